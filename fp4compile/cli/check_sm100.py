"""Check the kernels for SM100: their machine code against bounds without the GPU, their results and times on it.

    python -m fp4compile check-sm100 [--sm 100 103 120] [--json FILE]
    python -m fp4compile check-sm100 --simulate [--sm 100 103 120 121] [--only TEXT] [--schedules N] [--json FILE]
    python -m fp4compile check-sm100 --run [--only TEXT] [--json FILE]

The first command compiles the kernels' launches for GPUs that may be absent, and prints figures of their machine code
beside the bounds (`fp4compile.check.bounds`). The figures do not measure speed. The command fails on spills, missing
instructions, loops that do not overlap and values that ptxas dropped. It also fails on numbers of instructions under
the version of Triton that set their bounds; under other versions it only prints them. The second command executes the
launches' PTX in a simulator, at small shapes: `fp4compile.check.simulation`. The third command needs a GPU:
`fp4compile.check.first_run`.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import triton

from fp4compile.check import environment, first_run, simulation
from fp4compile.check.bounds import COMPILER, judges_figures
from fp4compile.check.machine_code import CodeRow, ProductRow, QuantizeRow, check_products, check_quantize

_ALL = (("kernel", 29), ("configuration", 26), ("format", 22), ("sm", 3))
_RESOURCES = (("regs", 4), ("shared", 6), ("spills", 6), ("CTAs", 4))
_PRODUCT = (("MMA", 18), ("cp", 3), ("TMA", 3), ("waits", 5), ("overlap", 7), ("store", 5), ("columns", 7))
_QUANTIZE = (("occupancy", 9), ("load", 4), ("store", 5), ("instr/16", 8), ("budget", 6), ("conversions", 12))


def add_command(commands: Any) -> None:
    """Add `check-sm100` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("check-sm100", help="check the SM100 kernels: machine code, with --run values")
    parser.set_defaults(run=run)
    parser.add_argument("--sm", type=int, nargs="+", default=[100], help="compute capabilities, 100 for 10.0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--run", action="store_true", dest="on_gpu",
                        help="run the kernels on the GPU that is here: values, then times")  # fmt: skip
    parser.add_argument("--simulate", action="store_true",
                        help="execute the kernels' PTX on the CPU: values, accesses, waits, deadlocks")  # fmt: skip
    parser.add_argument("--schedules", type=int, default=2, metavar="N",
                        help="with --simulate: in how many orders of its warps each launch runs")  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="with --run or --simulate: cases whose names contain this")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if a kernel misses a bound or has wrong results.

    Raises argparse.ArgumentTypeError where the command cannot run.
    """
    if args.on_gpu:
        return first_run.run(args.json, args.only)
    if args.simulate:
        return simulation.run(args.json, args.only, args.sm, args.schedules)
    failed = unjudged = 0
    rows: dict[str, list[dict[str, Any]]] = {"products": [], "quantizers": []}
    for name, header, found in (
        ("products", (*_ALL, *_RESOURCES, *_PRODUCT), itertools.chain.from_iterable(map(check_products, args.sm))),
        ("quantizers", (*_ALL, *_RESOURCES, *_QUANTIZE), itertools.chain.from_iterable(map(check_quantize, args.sm))),
    ):
        _print(header, found, rows[name])
        failed += sum(bool(row["problems"]) for row in rows[name])
        unjudged += sum(bool(row["unjudged"]) for row in rows[name])
    if not judges_figures():
        print(f"counts of instructions are shown and not judged: their lines are for Triton {COMPILER}, and this "
              f"is Triton {triton.__version__}; {unjudged} launches have more")  # fmt: skip
    print(f"{failed} of {sum(map(len, rows.values()))} launches are below their line")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment.of_compiler(), **rows}, indent=1) + "\n")
    return 1 if failed else 0


def _print(header: Sequence[tuple[str, int]], found: Iterable[CodeRow], rows: list[dict[str, Any]]) -> None:
    """Print a line for each row, with its problems below, and append the rows to `rows`."""
    print("  ".join(name.ljust(width) for name, width in header))
    for row in found:
        rows.append(row.to_dict())
        print("  ".join(str(cell).ljust(width) for cell, (_, width) in zip(_cells(row), header, strict=False)))
        for problem in row.problems:
            print(f"    below its line: {problem}")
        for figure in row.unjudged:
            print(f"    not judged: {figure}")
    print()


def _cells(row: CodeRow) -> list[Any]:
    cells: list[Any] = [row.kernel, row.configuration, row.format, row.sm]
    if row.resources is None:
        return cells
    has = row.resources
    cells += [has.registers, has.shared, has.spills, has.programs]
    if isinstance(row, ProductRow):
        cells += [" ".join(sorted(set(map(instruction_name, row.instruction)))), row.scale_copies, row.tma_loads,
                  row.waits, "yes" if row.overlapped else "no", row.stores, has.tensor_columns]  # fmt: skip
    elif isinstance(row, QuantizeRow):
        cells += [f"{has.occupancy:.0%}", row.loads, row.stores, f"{row.instructions:.0f}", f"{row.budget:.0f}",
                  " ".join(row.conversions)]  # fmt: skip
    return cells


def instruction_name(opcode: str) -> str:
    """A matrix instruction in a few words: "tcgen05 mxf4nvf4", "mma.sync bf16"."""
    family = re.match(r"tcgen05|wgmma|mma\.sync", opcode)
    kind = re.search(r"kind::(\w+)", opcode) or re.search(r"\.(bf16|f16|e4m3|e2m1|tf32)\b", opcode)
    return " ".join(one for one in (family[0] if family else opcode, kind[1] if kind else "") if one)
