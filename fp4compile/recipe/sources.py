"""Read recipe fields from TOML and JSON files, the environment and command lines, and write them to files."""

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4compile.formats.formats import unknown_name
from fp4compile.recipe.atomic_file import write_atomically
from fp4compile.recipe.named_recipes import FIELDS

ENVIRONMENT = "FP4COMPILE_RECIPE"
DEFAULT = "nvfp4"
_TABLE = "fp4compile"
# TOML from `write` begins with the first of these keys and ends with the second; a truncated file lacks the second.
_OPENING, _CLOSING = "saved_by", "complete"
_OPTIONS = ("recipe", "skip", "skip_first", "skip_last", "lm_head", "set")
# Values that --fp4compile-set takes without quotes: names, and format specs such as e2m1:1x16:e4m3:tensor:te.
_BARE_WORD = re.compile(r"[\w.:+-]+")


@contextmanager
def errors_name(source: str) -> Iterator[None]:
    """Prefix the message of an error by the name of a source."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise type(error)(f"{source}{error}") from error


def read_toml(path: str | Path, field_names: Sequence[str]) -> dict[str, Any]:
    """The recipe fields of a TOML file, see `Recipe.from_toml`. field_names: not allowed outside of the table."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    fields = _uncut(path, content.get(_TABLE, content))
    if not fields:
        raise ValueError(f'{path} has no recipe in it: expected recipe = "NAME", or fields of a recipe')
    if _TABLE in content:
        beside = sorted(content.keys() & {"recipe", *field_names} - {"name"})
        if beside:
            raise ValueError(f"{path}: {', '.join(beside)} at top level, beside the table [{_TABLE}]: move it in")
    return fields


def _uncut(path: str | Path, fields: Any) -> Any:
    """The fields without the keys that `write` adds around them. Raises ValueError if the last key is missing."""
    if not isinstance(fields, dict):
        return fields
    whole = fields.get(_CLOSING) is True
    if _OPENING in fields and not whole:
        raise ValueError(
            f"{path} was saved by Recipe.save and lacks its last line, `{_CLOSING} = true`: it was cut. Save the "
            f"recipe again, or remove the line `{_OPENING}` where you know that the file is whole"
        )
    return {name: value for name, value in fields.items() if name != _OPENING and not (whole and name == _CLOSING)}


def write(path: str | Path, fields: dict[str, Any]) -> None:
    """Write recipe fields to a .toml or .json file. See `Recipe.save`."""
    ending = Path(path).suffix
    if ending == ".json":
        text = json.dumps(fields, indent=1) + "\n"
    elif ending == ".toml":
        text = (
            "# Written by Recipe.save of fp4compile. It is refused without its last line.\n"
            f'{_OPENING} = "fp4compile"\n{to_toml(fields)}{_CLOSING} = true\n'
        )
    else:
        raise ValueError(f"path={str(path)!r}: expected a name that ends in .toml or .json")
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def to_toml(fields: dict[str, Any]) -> str:
    """TOML of JSON-compatible fields. None, the default of all fields that allow it, is absent: TOML has no null.

    A dict's entries are dotted keys: all lines below a table's header, later fields too, would belong to the table.
    """
    lines = []
    for name, value in fields.items():
        if isinstance(value, dict):
            lines += [f"{name}.{_toml_value(key)} = {_toml_value(one)}" for key, one in value.items()]
        elif value is not None:
            lines.append(f"{name} = {_toml_value(value)}")
    return "".join(f"{line}\n" for line in lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml_value(one)}' for key, one in value.items())}}}"
    # JSON's strings, numbers and booleans are valid TOML, except one control character that only TOML escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the --fp4compile-* options to a parser; `Recipe.from_args` reads them from its result.

    parser: of a script or of a subcommand. Raises argparse.ArgumentError if it has such an option already.
    """
    group = parser.add_argument_group("fp4compile")
    group.add_argument(
        "--fp4compile-recipe", metavar="NAME|FILE", type=_name_or_path,
        help=f"one of {', '.join(FIELDS)}, or a .toml or .json file",
    )  # fmt: skip
    group.add_argument(
        "--fp4compile-skip", action="append", default=[], metavar="GLOB", help="do not quantise layers of this name"
    )
    group.add_argument("--fp4compile-skip-first", type=int, metavar="N", help="do not quantise the first N blocks")
    group.add_argument("--fp4compile-skip-last", type=int, metavar="N", help="do not quantise the last N blocks")
    group.add_argument("--fp4compile-lm-head", action="store_true", help="quantise output heads too")
    group.add_argument(
        "--fp4compile-set", action="append", default=[], metavar="FIELD=VALUE", help="set a recipe field (TOML value)"
    )


def _name_or_path(value: str) -> str:
    """The value of --fp4compile-recipe. Raises ArgumentTypeError for an unknown name and a file that is not there."""
    if value not in FIELDS and not (Path(value).suffix in (".toml", ".json") and Path(value).exists()):
        raise argparse.ArgumentTypeError(f"{unknown_name('recipe', value, FIELDS)}, and .toml and .json files")
    return value


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """Recipe fields by name, as the parsed --fp4compile-* options set them. See `Recipe.from_args`."""
    if not all(hasattr(args, f"fp4compile_{option}") for option in _OPTIONS):
        raise TypeError("args: expected what a parser with fp4compile.add_arguments has parsed")
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
    if parsed.keys() != {"value"}:  # a multi-line text may have further assignments, and tables
        raise ValueError(
            f"--fp4compile-set {setting!r}: {text!r} is neither one TOML value nor one word; another field needs an "
            "option of its own"
        )
    return field, parsed["value"]
