"""Recipes: the format of each operand of each matmul, and the layers that are not quantised."""

from fp4compile.recipe.named_recipes import PRODUCTS
from fp4compile.recipe.recipe import Recipe, named, recipes, resolve
from fp4compile.recipe.rules import Rule
from fp4compile.recipe.sources import DEFAULT, ENVIRONMENT, add_arguments

__all__ = [
    "DEFAULT",
    "ENVIRONMENT",
    "PRODUCTS",
    "Recipe",
    "Rule",
    "add_arguments",
    "named",
    "recipes",
    "resolve",
]
