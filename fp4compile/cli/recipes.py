"""`python -m fp4compile recipes`: the named recipes and their formats, or all fields of one recipe."""

import argparse
import json
from typing import Any

from fp4compile.cli import arguments
from fp4compile.recipe import PRODUCTS, named, recipes
from fp4compile.recipe.sources import to_toml


def add_command(commands: Any) -> None:
    """Add `recipes` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("recipes", help="list the named recipes, or print the fields of one")
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help="print this recipe's fields as TOML")
    parser.add_argument("--json", action="store_true", help="print JSON: the fields of the recipe, or of every recipe")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the fields of one recipe. Raises ArgumentTypeError for a recipe that does not exist."""
    if args.name is not None:
        fields = arguments.recipe(args.name).to_dict()
        print(json.dumps(fields, indent=1) if args.json else to_toml(fields), end="\n" if args.json else "")
    elif args.json:
        print(json.dumps({name: named(name).to_dict() for name in recipes()}, indent=1))
    else:
        print(recipe_table())


def recipe_table() -> str:
    """A line for each named recipe: the formats of each matmul's operands, "-" for high precision, and switches."""
    products = [product for product in PRODUCTS if any(named(name).quantizes(product) for name in recipes())]
    rows = [("recipe", *products, "activation scale", "stochastic rounding", "Hadamard")]
    for name in recipes():
        recipe = named(name)
        switches = (", ".join(chosen) or "-" for chosen in (recipe.stochastic_rounding, recipe.hadamard))
        formats = (_formats(recipe.operands(product)) for product in products)
        rows.append((name, *formats, recipe.activation_scale, *switches))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _formats(operands: tuple[str | None, str | None]) -> str:
    if operands == (None, None):
        return "-"
    return " x ".join(name or "-" for name in operands)
