"""`python -m fp4compile recipes`: the named recipes, and their formats for each product."""

from typing import Any

from fp4compile.recipe import PRODUCTS, named, recipes


def add_command(commands: Any) -> None:
    """Add `recipes` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("recipes", help="list the named recipes and their formats")
    parser.set_defaults(run=lambda _: print(recipe_table()))


def recipe_table() -> str:
    """A line for each named recipe: the formats of each product's operands, "-" for high precision, and switches."""
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
