"""`python -m tests.fuzz`: random programs against their oracle. See `--help`."""

import argparse
import os
import sys
import time
import warnings

if "--launches" in sys.argv:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.fuzz import (  # noqa: F401 (some register the kinds of steps)
    layers,
    models,
    random_products,
    random_quantisers,
    simulated,
    weights,
    writes,
)
from tests.fuzz.compare import Finding, Fuzzer
from tests.fuzz.kinds import KINDS
from tests.fuzz.launches import LaunchFuzzer
from tests.fuzz.programs import Program, Style, build
from tests.helpers import in_interpreter


def main() -> int:
    """Returns 1 if there was a finding."""
    options = _parser().parse_args()
    warnings.simplefilter("ignore")  # of programs whose recipe leaves all alone, and of Dynamo
    if options.writes:
        return min(1, writes.search(options.seed, options.count))
    for wanted, kind in ((options.products, random_products), (options.quantisers, random_quantisers)):
        if wanted:
            return min(1, simulated.search(kind.wrong_with, options.seed, options.count))
    fuzzer = fuzzer_of(options)
    start, found = time.perf_counter(), 0
    for done, seed in enumerate(options.seeds or range(options.seed, options.seed + options.count)):
        if done and done % 100 == 0:  # of a search that somebody ends, too
            print(f"{done} programs, {found} findings", file=sys.stderr, flush=True)
        finding, shown = check_one(fuzzer, seed, options)
        if finding is not None:
            print("=" * 100, shown, sep="\n", flush=True)
        found += finding is not None
    seconds = time.perf_counter() - start
    print(f"{fuzzer.run} runs in {seconds:.0f} s, {fuzzer.counted()}, {found} findings")
    return 1 if found else 0


def fuzzer_of(options: argparse.Namespace) -> Fuzzer | LaunchFuzzer:
    if options.launches:
        in_interpreter.be_quick()
        return LaunchFuzzer()
    return Fuzzer(options.device, options.inductor, torch.bfloat16 if options.large else torch.float32)


def check_one(fuzzer: Fuzzer | LaunchFuzzer, seed: int, options: argparse.Namespace) -> tuple[Finding | None, str]:
    """What is wrong with the program of a seed, or None, and what is printed of it: of its shortest form if wanted."""
    style = Style(large=options.large, ragged=options.launches)
    finding = fuzzer.check(build(seed, style, tuple(options.only)))
    if finding is None:
        return None, ""
    return finding, str(shrink(fuzzer, finding))


def shrink(fuzzer: Fuzzer | LaunchFuzzer, finding: Finding) -> Finding:
    """The finding of the shortest program, by steps left out, that has one of its kind."""
    for index in reversed(range(len(finding.program.steps))):
        shorter: Program | None = finding.program.without(index)
        if shorter is not None:
            found = fuzzer.check(shorter)
            if found is not None and found.kind == finding.kind:
                return shrink(fuzzer, found)
    return finding


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", help="of all programs, in the place of these two")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--inductor", action="store_true", help="compile with code generation")
    parser.add_argument("--large", action="store_true", help="sizes for a GPU, in bfloat16")
    parser.add_argument("--launches", action="store_true", help="launch every op in Triton's interpreter")
    parser.add_argument("--writes", action="store_true", help="sequences of writes to weights, whose packed forms must "
                        "never be older")  # fmt: skip
    parser.add_argument("--products", action="store_true", help="matmuls of random formats and sizes, in the simulator")
    parser.add_argument("--quantisers", action="store_true", help="quantisers of random tensors, in the simulator")
    parser.add_argument("--only", nargs="*", default=[], choices=[*KINDS], help="kinds of steps to draw from (all)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
