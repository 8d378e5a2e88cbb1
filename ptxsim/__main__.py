"""Run a script whose kernels are executed in the simulator, or a kernel in PTX.

python -m ptxsim script.py [-- arguments]        # kernels that it launches, on tensors of the CPU
python -m ptxsim script.py::function             # imports it, and calls a function without arguments
python -m ptxsim kernel.ptx --meta kernel.json   # the PTX with its launch, as the page `ptxsim` describes
python -m ptxsim kernel.ptx --list-forms         # every instruction form that is not simulated
"""

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from ptxsim.fault import Fault
from ptxsim.forms import UnknownForm
from ptxsim.kernel_launch import Compiled, Simulator
from ptxsim.parse import parse
from ptxsim.run import Kernel, Schedule
from ptxsim.virtual_gpu import ARCHITECTURES, gpu


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 for a fault, 2 for unknown forms or wrong arguments."""
    parser = argparse.ArgumentParser(
        "python -m ptxsim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", help="a script, a script and a function of it, or PTX")
    parser.add_argument("arguments", nargs="*", help="of the script, after --")
    parser.add_argument(
        "--arch", default="sm_100a", choices=ARCHITECTURES, help="the GPU for which a script's kernels are compiled"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of warps; with 0 they run in lockstep")
    parser.add_argument("--failing-waits", action="store_true", help="let mbarrier.try_wait return false at times")
    parser.add_argument("--strict", action="store_true", help="faults for what is a note otherwise: see `Schedule`")
    parser.add_argument("--meta", type=Path, help="of PTX: a file with the launch")
    parser.add_argument("--list-forms", action="store_true", help="of PTX: only list its unknown forms")
    given = parser.parse_args(arguments)
    strict = dict.fromkeys(("strict_loads", "strict_scopes", "strict_fences", "strict_stores"), given.strict)
    schedule = Schedule(given.seed, failing_waits=given.failing_waits, **strict)
    path, _, function = given.file.partition("::")
    if not Path(path).is_file():
        parser.error(f"file: there is no {path}")
    simulator = Simulator(schedule)
    try:
        if path.endswith(".ptx"):
            ptx = Path(path).read_text()
            kernel = Kernel.of(parse(ptx))
            if given.list_forms:
                return 0
            if given.meta is None:
                parser.error("--meta: PTX needs its launch")
            _launch(simulator, ptx, kernel, json.loads(given.meta.read_text()))
        else:
            with gpu(given.arch, schedule) as simulator:
                _run(path, function, given.arguments)
    except UnknownForm as error:
        print(error, file=sys.stderr)
        return 2
    except Fault as fault:
        print(f"fault: {fault}", file=sys.stderr)
        return 1
    print(f"{simulator.tally.instructions} warp instructions in {simulator.seconds:.1f} s")
    for note, count in simulator.tally.notes.items():
        print(f"note: {note}: {count} times")
    return 0


def _run(path: str, function: str, arguments: list[str]) -> None:
    """Run a script as the main program, or a function of it."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    names = runpy.run_path(path, run_name="ptxsim_script" if function else "__main__")
    if function:
        if not callable(names.get(function)):
            raise ValueError(f"{path} has no function {function!r}")
        names[function]()


def _launch(simulator: Simulator, ptx: str, kernel: Kernel, meta: dict[str, Any]) -> None:
    """Launch PTX. meta: grid, shared bytes, arguments, and optionally the bytes of a program's global scratch."""
    compiled = Compiled(ptx, kernel, meta.get("shared", 0), meta.get("global_scratch_size", 0),
                        meta.get("global_scratch_align", 1))  # fmt: skip
    x, y, z = [*meta["grid"], 1, 1][:3]
    tensors = [_argument(each) for each in meta["arguments"]]
    simulator.execute(compiled, tensors, (x, y, z))
    for i, each in enumerate(meta["arguments"]):
        if isinstance(each, dict) and "save" in each:
            torch.save(tensors[i], each["save"])


def _argument(given: Any) -> Any:
    """A number; or a tensor of {"shape", "dtype"} with zeros, or of {"load": a file of torch.save}."""
    if not isinstance(given, dict):
        return given
    if "load" in given:
        return torch.load(given["load"])
    return torch.zeros(given["shape"], dtype=getattr(torch, given["dtype"]))


if __name__ == "__main__":
    sys.exit(main())
