"""The parser of `python -m fp4compile <command>`.

A subcommand is a module with `add_command(commands)`, which adds a parser whose default `run` is a function of the
parsed arguments. `run` returns None or an exit status, and raises `argparse.ArgumentTypeError` for unusable arguments.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from fp4compile import __version__
from fp4compile.cli import check_sm100, demo, explain_command, recipes, run_command
from fp4compile.formats.formats import unknown_name

_COMMANDS = (demo, run_command, recipes, explain_command, check_sm100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. arguments: None takes the command line's.

    Returns 0, 1 for a failed check, or 141 where what reads the output, such as `head`, has ended. Exits with status 2
    for missing or wrong arguments.
    """
    parser = _parser()
    given = sys.argv[1:] if arguments is None else arguments
    if given and not given[0].startswith("-") and given[0] not in _names():
        parser.error(unknown_name("command", given[0], _names()))
    chosen = parser.parse_args(given)
    if chosen.command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    try:
        return _status(chosen)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))


def _status(chosen: argparse.Namespace) -> int:
    """Run a parsed command. Returns its status, or 128 + SIGPIPE, as a shell does, where nobody reads its output."""
    if chosen.command == "run":  # what a script writes is its own
        return chosen.run(chosen) or 0
    output = sys.stdout  # None where the process began with it closed
    if isinstance(output, io.TextIOWrapper):  # reports have letters that not every terminal's encoding has
        output.reconfigure(errors="backslashreplace")
    try:
        status = chosen.run(chosen) or 0
        if output is not None:
            output.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # Python flushes the rest when it ends
        return 128 + signal.SIGPIPE
    return status


def _names() -> list[str]:
    """The names of the commands, from those of their modules, such as `run_command` and `check_sm100`."""
    names = (command.__name__.rpartition(".")[2] for command in _COMMANDS)
    return [name.removesuffix("_command").replace("_", "-") for name in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp4compile", description="Block-scaled FP4 and FP8 matmuls for torch.compile."
    )
    parser.add_argument("--version", action="version", version=f"fp4compile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command [options]", dest="command")
    for command in _COMMANDS:
        command.add_command(commands)
    return parser
