"""Where recipes come from: names, dicts, TOML files, the environment, command lines."""

import argparse
import dataclasses
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from fp4compile.recipe import Recipe, named, recipes

ENVIRONMENT = "FP4COMPILE_RECIPE"
DEFAULT = "nvfp4"
_TABLE = "fp4compile"
_OPTIONS = ("recipe", "skip", "skip_first", "skip_last", "lm_head", "set")
# What --fp4compile-set takes without quotes: names, and spec strings of formats such as e2m1:1x16:e4m3:tensor:te.
_BARE_WORD = re.compile(r"[\w.:+-]+")


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
    """The recipe that FP4COMPILE_RECIPE names (a name or the path of a .toml file); None where it is unset or empty.

    Raises what `resolve` raises, with the variable's name in front.
    """
    value = os.environ.get(ENVIRONMENT)
    if not value:
        return None
    try:
        return resolve(value)
    except (ValueError, TypeError, OSError) as error:
        raise type(error)(f"{ENVIRONMENT}={value}: {error}") from error


def from_toml(path: str | Path) -> Recipe:
    """The recipe of a TOML file: its table [fp4compile], or the whole file; fields as in `Recipe.from_dict`.

    Beside the table the file may hold what it likes, but no field of a recipe at top level: nothing would read it. A
    `name` is allowed, because files have names of their own and it changes no number.

    Raises ValueError for a file that is not TOML, that says nothing, or that has fields beside the table; ValueError
    and TypeError, with the file's name in front, as `Recipe.from_dict` does; OSError for a file that is not there.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    fields = content.get(_TABLE, content)
    if not fields:
        raise ValueError(f'{path} has no recipe in it: expected recipe = "NAME", or fields of a recipe')
    if _TABLE in content:
        beside = sorted(content.keys() & {"recipe", *_field_names()} - {"name"})
        if beside:
            raise ValueError(f"{path}: {', '.join(beside)} at top level, beside the table [{_TABLE}]: move it in")
    try:
        return Recipe.from_dict(fields)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from error


def _field_names() -> list[str]:
    return [field.name for field in dataclasses.fields(Recipe)]


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
    group.add_argument("--fp4compile-lm-head", action="store_true", help="quantise output heads too")
    group.add_argument(
        "--fp4compile-set", action="append", default=[], metavar="FIELD=VALUE", help="set a recipe field (TOML value)"
    )


def from_args(args: argparse.Namespace) -> Recipe | None:
    """The recipe of parsed --fp4compile-* options; None where neither they nor FP4COMPILE_RECIPE name one.

    Raises ValueError for an unknown recipe or field, for a malformed FIELD=VALUE, for a field that is set twice, and
    for options without a recipe; TypeError for arguments of a parser that has not been through `add_arguments`.
    """
    if not all(hasattr(args, f"fp4compile_{option}") for option in _OPTIONS):
        raise TypeError("args: expected what a parser with fp4compile.add_arguments has parsed")
    overrides = _overrides(args)
    skips = tuple((glob, "skip") for glob in args.fp4compile_skip)
    base = from_env() if args.fp4compile_recipe is None else resolve(args.fp4compile_recipe)
    if base is None:
        if overrides or skips:
            raise ValueError(f"--fp4compile options without --fp4compile-recipe or {ENVIRONMENT}")
        return None
    chosen = base.replace(**overrides)
    # What the command line leaves alone outranks the recipe's own rules, and those of --fp4compile-set.
    return chosen.replace(rules=(*skips, *chosen.rules)) if skips else chosen


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if args.fp4compile_skip_first is not None:
        overrides["skip_first_blocks"] = args.fp4compile_skip_first
    if args.fp4compile_skip_last is not None:
        overrides["skip_last_blocks"] = args.fp4compile_skip_last
    if args.fp4compile_lm_head:
        overrides["skip_lm_head"] = False
    for setting in args.fp4compile_set:
        field, value = _setting(setting)
        if field in overrides:
            raise ValueError(f"--fp4compile-set {setting!r}: {field} is set by another option already")
        overrides[field] = value
    return overrides


def _setting(setting: str) -> tuple[str, Any]:
    """(field, value) of FIELD=VALUE. The value is one TOML value; a bare word is a string."""
    field, equals, text = (part.strip() for part in setting.partition("="))
    if not equals:
        raise ValueError(f"--fp4compile-set {setting!r}: expected FIELD=VALUE")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": text} if _BARE_WORD.fullmatch(text) else {}
    if parsed.keys() != {"value"}:  # on lines of its own a text may hold more assignments, and tables
        raise ValueError(
            f"--fp4compile-set {setting!r}: {text!r} is neither one TOML value nor one word; another field needs an "
            "option of its own"
        )
    return field, parsed["value"]
