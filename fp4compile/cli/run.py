"""Run an unchanged script: `python -m fp4compile run train.py --torch_compile_backend fp4compile_mxfp8`.

A framework that passes the name of a backend on to `torch.compile` needs no change. HuggingFace's accelerate, and with
it the `Trainer`, first checks the name against its own enumeration; `register_with_accelerate` adds the names.
"""

import argparse
import atexit
import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any

from fp4compile.registration import named_reports, register_with_accelerate, warn_at_exit


def add_command(commands: Any) -> None:
    """Add `run` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("run", help="run a script whose flags name a backend of this package")
    parser.add_argument("script", type=_script, help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=lambda args: run(args.script, args.arguments))


def _script(name: str) -> Path:
    if not Path(name).exists():
        raise argparse.ArgumentTypeError(f"there is no file {name!r}")
    return Path(name)


def run(script: Path, arguments: list[str]) -> None:
    """Run a script as `python script arguments` would, then print to stderr what was quantised."""
    with contextlib.suppress(ImportError):  # where accelerate is not installed, the script does not use it
        register_with_accelerate()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit.unregister(warn_at_exit)  # the lines below report it
        reports = named_reports()
        for report in reports:
            print(report.summary(), file=sys.stderr)
        if not reports:
            print("fp4compile: the script gave none of this package's backends to torch.compile", file=sys.stderr)
