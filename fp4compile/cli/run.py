"""Run an existing script as it is: `python -m fp4compile run train.py --torch_compile_backend fp4compile_mxfp8`.

Frameworks that hand the name of a backend to `torch.compile` need nothing. HuggingFace's accelerate (and with it the
`Trainer`) checks the name against an enumeration of its own first; `register_with_accelerate` adds this package's.
"""

import argparse
import atexit
import contextlib
import runpy
import sys
from pathlib import Path

from fp4compile.backend import named_reports, say_what_compiled_nothing
from fp4compile.recipe import recipes


def register_with_accelerate() -> None:
    """Let accelerate, and HuggingFace's `Trainer`, take this package's backends by name.

    Raises ImportError where accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    names = {"fp4compile", *(f"fp4compile_{name}" for name in recipes())}

    def missing(cls: type[DynamoBackend], value: str) -> DynamoBackend | None:
        # accelerate upper-cases the name that it is given, and lower-cases the one that it hands to torch.compile.
        if value.lower() not in names:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return cls._value2member_map_.setdefault(value, member)

    DynamoBackend._missing_ = classmethod(missing)


def add_command(commands) -> None:
    """Add `run` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("run", help="run a script whose flags name a backend of this package")
    parser.add_argument("script", type=Path, help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=lambda args: run(args.script, args.arguments))


def run(script: Path, arguments: list[str]) -> None:
    """Run a script as `python script arguments` would, then say on stderr what was quantised."""
    with contextlib.suppress(ImportError):  # without accelerate, the script does not use it either
        register_with_accelerate()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit.unregister(say_what_compiled_nothing)  # it is said here
        reports = named_reports()
        for report in reports:
            print(report.summary(), file=sys.stderr)
        if not reports:
            print("fp4compile: the script gave none of this package's backends to torch.compile", file=sys.stderr)
