"""Run an unchanged script: `python -m fp4compile run train.py --torch_compile_backend fp4compile_mxfp8`.

It prints the reports. Backend names do not need it: `torch.compile`, and accelerate's and the `Trainer`'s flags accept
them wherever this package is installed.

`--in-place` is for scripts that train the compiled model and evaluate the original one, as the `Trainer` does.

`run -m package.module` runs a module, as `python -m` does. Launchers run this command as a module, too:
`torchrun -m fp4compile run train.py`, `accelerate launch -m fp4compile run train.py`.
"""

import argparse
import atexit
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4compile import _inductor_patches
from fp4compile.registration import is_backend, named_reports, warn_at_exit
from fp4compile.report.names import unwrapped


def add_command(commands: Any) -> None:
    """Add `run` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser(
        "run", help="run a script whose flags name a backend of this package",
        usage="python -m fp4compile run [--in-place] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
    )  # fmt: skip
    parser.add_argument(
        "--in-place", action="store_true",
        help="torch.compile compiles the script's modules in place, so that what calls the original model runs the "
        "compiled one, as the evaluation of HuggingFace's Trainer does",
    )  # fmt: skip
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments")
    parser.add_argument("script", nargs="?", type=_script, help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=_run)


def _script(name: str) -> Path:
    if not Path(name).exists():
        raise argparse.ArgumentTypeError(f"there is no file {name!r}")
    return Path(name)


def _run(args: argparse.Namespace) -> None:
    if args.in_place:
        _inductor_patches.compile_in_place(is_backend, unwrapped)
    if args.module:
        run_module(args.module[0], args.module[1:])
    elif args.script is not None:
        run(args.script, args.arguments)
    else:
        raise argparse.ArgumentTypeError("run: expected a script, or -m and a module")


def run(script: Path, arguments: list[str]) -> None:
    """Run a script as `python script arguments` would, then print the reports to stderr."""
    sys.path.insert(0, str(script.parent))
    _reporting(lambda: runpy.run_path(str(script), run_name="__main__"), [str(script), *arguments])


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module or package as `python -m name arguments` would, then print the reports to stderr.

    Raises ArgumentTypeError where there is no module of this name.
    """
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # a package above it is missing; the name is malformed
        found = None
    if found is None:
        raise argparse.ArgumentTypeError(f"run -m: there is no module {name!r}")
    _reporting(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), [name, *arguments])


def _reporting(program: Callable[[], object], argv: list[str]) -> None:
    """Run a program under its own `sys.argv`, then print the reports; with its rank if there are several."""
    sys.argv = argv
    rank = f"rank {os.environ.get('RANK', '?')}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    try:
        program()
    finally:
        atexit.unregister(warn_at_exit)  # the lines below report it
        reports = named_reports()
        for report in reports:
            print(f"{rank}{report.summary()}", file=sys.stderr)
        if not reports:
            print(
                f"{rank}fp4compile: the script gave none of this package's backends to torch.compile", file=sys.stderr
            )
