"""Where recipes come from: names, dicts, TOML files, the environment, command lines."""

import argparse
import os
import tomllib
from pathlib import Path
from typing import Any

from fp4compile.recipe import Recipe, named, recipes

ENVIRONMENT = "FP4COMPILE_RECIPE"
DEFAULT = "nvfp4"


def resolve(recipe: str | dict | Recipe | Path | None = None, **overrides: Any) -> Recipe:
    """The recipe that the user means.

    recipe: a `Recipe`, a dict (see `Recipe.from_dict`), a name, or the path of a .toml file; None takes the
        environment variable FP4COMPILE_RECIPE (a name or a path), or "nvfp4".
    overrides: fields to replace.

    Raises ValueError for an unknown name or field, TypeError for anything else, OSError for a file that is not there.
    """
    if recipe is None:
        chosen = from_env() or named(DEFAULT)
    elif isinstance(recipe, Recipe):
        chosen = recipe
    elif isinstance(recipe, dict):
        chosen = Recipe.from_dict(recipe)
    elif isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".toml")):
        chosen = from_toml(recipe)
    elif isinstance(recipe, str):
        chosen = named(recipe)
    else:
        raise TypeError(f"recipe: expected a name, a dict, a path or a Recipe, got {type(recipe).__name__}")
    return chosen.replace(**overrides) if overrides else chosen


def from_env() -> Recipe | None:
    """The recipe that FP4COMPILE_RECIPE names (a name or the path of a .toml file); None where it is unset."""
    value = os.environ.get(ENVIRONMENT)
    return resolve(value) if value else None


def from_toml(path: str | Path) -> Recipe:
    """The recipe of a TOML file: its table [fp4compile], or the whole file; fields as in `Recipe.from_dict`.

    Raises ValueError for a file that is not TOML.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return Recipe.from_dict(content.get("fp4compile", content))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the --fp4compile-* options to a parser; `Recipe.from_args` reads them."""
    group = parser.add_argument_group("fp4compile")
    group.add_argument(
        "--fp4compile-recipe", metavar="NAME|FILE", help=f"one of {', '.join(recipes())}, or a .toml file"
    )
    group.add_argument(
        "--fp4compile-skip", action="append", default=[], metavar="GLOB", help="leave layers of this name alone"
    )
    group.add_argument("--fp4compile-skip-first", type=int, metavar="N", help="leave the first N blocks alone")
    group.add_argument("--fp4compile-skip-last", type=int, metavar="N", help="leave the last N blocks alone")
    group.add_argument("--fp4compile-lm-head", action="store_true", help="quantise the LM head too")
    group.add_argument(
        "--fp4compile-set", action="append", default=[], metavar="FIELD=VALUE", help="set a recipe field (TOML value)"
    )


def from_args(args: argparse.Namespace) -> Recipe | None:
    """The recipe of parsed --fp4compile-* options; None where neither they nor FP4COMPILE_RECIPE name one.

    Raises ValueError for an unknown recipe or field, for a malformed FIELD=VALUE, and for options without a recipe.
    """
    overrides = _overrides(args)
    skips = tuple((glob, "skip") for glob in args.fp4compile_skip)
    base = from_env() if args.fp4compile_recipe is None else resolve(args.fp4compile_recipe)
    if base is None:
        if overrides or skips:
            raise ValueError(f"--fp4compile options without --fp4compile-recipe or {ENVIRONMENT}")
        return None
    if skips:  # what the command line leaves alone outranks the recipe's own rules
        overrides["rules"] = (*skips, *overrides.get("rules", base.rules))
    return base.replace(**overrides)


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if args.fp4compile_skip_first is not None:
        overrides["skip_first_blocks"] = args.fp4compile_skip_first
    if args.fp4compile_skip_last is not None:
        overrides["skip_last_blocks"] = args.fp4compile_skip_last
    if args.fp4compile_lm_head:
        overrides["skip_lm_head"] = False
    for setting in args.fp4compile_set:
        field, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--fp4compile-set {setting!r}: expected FIELD=VALUE")
        overrides[field.strip()] = _toml_value(value.strip())
    return overrides


def _toml_value(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
