"""The command line: `python -m fp4compile <command>`."""

import argparse

from fp4compile.cli import check_sm100, demo, run
from fp4compile.recipe import PRODUCTS, named, recipes


def main(arguments: list[str] | None = None) -> None:
    """Parse and run one command. A module that brings a command has an `add_command(subparsers)`."""
    parser = argparse.ArgumentParser(prog="fp4compile", description=__doc__)
    commands = parser.add_subparsers(metavar="command", required=True)
    demo.add_command(commands)
    check_sm100.add_command(commands)
    run.add_command(commands)
    add_recipes(commands)
    chosen = parser.parse_args(arguments)
    chosen.run(chosen)


def add_recipes(commands) -> None:
    parser = commands.add_parser("recipes", help="list the named recipes and the formats they give each product")
    parser.set_defaults(run=lambda _: print(recipe_table()))


def recipe_table() -> str:
    """One line a named recipe: the formats of each product's operands, "-" for high precision, and the switches."""
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


if __name__ == "__main__":
    main()
