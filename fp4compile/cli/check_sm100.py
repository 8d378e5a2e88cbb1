"""Compile the kernels, as they are launched, for GPUs that need not be there, and look at the machine code.

    python -m fp4compile check-sm100 [--sm 100 103 120]

This says what the code is: that it assembles, which conversion and which matrix instructions it has, that nothing
spills to local memory, that the quantise kernels read and write global memory 16 bytes at a time, that a product's
shared and tensor memory are there. It says nothing about speed.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from fp4compile import _compat, formats
from fp4compile.epilogue import Epilogue
from fp4compile.operand import Operand
from fp4compile.targets import Target
from fp4compile.templates.gemm.choose import choose
from fp4compile.templates.gemm.dispatch import scaled_mm, scaled_mm_group
from fp4compile.templates.gemm.problem import problem_of
from fp4compile.templates.launch import Launched, dry_run
from fp4compile.templates.quantize import dispatch as kernels

SIZE = 8192


@dataclass(frozen=True)
class Configuration:
    """One way to call the kernels: what is launched, and on which format."""

    label: str
    format: str
    call: Callable[[torch.Tensor, formats.BlockFormat], object]
    shape: tuple[int, int] = (SIZE, SIZE)
    dtype: torch.dtype = torch.bfloat16

    def launches(self, sm: int) -> list[Launched]:
        with dry_run(Target(sm)) as launches:
            self.call(torch.empty(self.shape, dtype=self.dtype, device="meta"), formats.get(self.format))
        return launches


def _rows(x, fmt):
    kernels.quantize(x, fmt)


def _swizzled(x, fmt):
    kernels.quantize(x, fmt, layout="swizzled")


def _columns(x, fmt):
    kernels.quantize(x.mT, fmt)


def _both(x, fmt):
    kernels.quantize_both(x, fmt)


def _seed():
    return torch.empty((), dtype=torch.int64, device="meta")


def _seeded(x, fmt):
    kernels.quantize(x, fmt, seed=_seed())


def _transformed(x, fmt):
    kernels.quantize(x.mT, fmt, transform=True)


def _trained(x, fmt):
    kernels.quantize_both(x, fmt, seed=_seed(), transform=True)


def _dequantize(x, fmt):
    with dry_run(Target(0)):  # only the dequantise kernel is of interest
        data, scales, outer = kernels.quantize(x, fmt)
    kernels.dequantize(data, scales, outer, fmt, x.shape[-1], x.dtype)


CONFIGURATIONS = (
    *(Configuration("rows", name, _rows) for name in ("nvfp4_one_level", "nvfp4", "nvfp4_te")),
    *(Configuration("rows", name, _rows) for name in ("mxfp8", "mxfp8_e5m2", "mxfp4")),
    Configuration("rows, float32", "nvfp4_one_level", _rows, dtype=torch.float32),
    Configuration("rows, float16", "nvfp4_one_level", _rows, dtype=torch.float16),
    *(Configuration("rows, swizzled", name, _swizzled) for name in ("nvfp4_one_level", "mxfp8")),
    *(Configuration("scaled rows", name, _rows) for name in ("nvfp4_rowwise", "float8_rowwise")),
    Configuration("scaled rows, long", "nvfp4_rowwise", _rows, shape=(SIZE, 2**16)),
    *(Configuration("columns", name, _columns) for name in ("nvfp4_one_level", "mxfp8", "mxfp4")),
    *(Configuration("scaled columns", name, _columns) for name in ("nvfp4_rowwise", "float8_rowwise")),
    *(Configuration("stochastic rows", name, _seeded) for name in ("nvfp4_te", "nvfp4_rowwise")),
    Configuration("transformed columns", "nvfp4_te", _transformed),
    Configuration("both, transform, seed", "nvfp4_te", _trained),
    *(Configuration("square", name, _rows) for name in ("nvfp4_16x16", "mxfp8_32x32")),
    *(Configuration("both", name, _both) for name in ("nvfp4_one_level", "nvfp4_16x16", "mxfp8", "mxfp8_32x32")),
    *(Configuration("both", name, _both) for name in ("mxfp4", "nvfp4", "float8_rowwise")),
    *(Configuration("dequantize", name, _dequantize) for name in ("nvfp4", "mxfp8")),
)  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """What the machine code of one launch has."""

    kernel: str
    configuration: str
    format: str
    sm: int
    registers: int
    shared: int
    local_accesses: int
    conversions: tuple[str, ...]
    wide_loads: int
    wide_stores: int

    def problems(self, expected: set[str]) -> list[str]:
        found = []
        if self.local_accesses:
            found.append(f"{self.local_accesses} local-memory accesses")
        if missing := expected - set(self.conversions):
            found.append(f"no conversion to {', '.join(sorted(missing))}")
        # The kernel of columns loads 4 or 8 bytes a thread, whole lines a warp: wider ones cost it registers.
        loads = self.wide_loads or self.kernel == "quantize_columns"
        if not loads or not (self.wide_stores or self.kernel.endswith("_amax")):
            found.append("no 16-byte global accesses")
        return found


# The element or scale type, and .RS where the conversion rounds stochastically.
_CONVERSION = re.compile(r"F2FP\.SATFINITE\.(E\dM\d|E8)\.F32\S*?(\.RS)?\s")


def expected_conversions(launched: Launched, sm: int) -> set[str]:
    """The conversion instructions that a launch should have on SM100 and up."""
    constants = launched.constants
    if sm < 100 or "CONTRACT" not in constants:  # an amax or a dequantise kernel
        return set()
    conversions = {constants["ELEMENT"].upper()}
    if constants.get("SEEDED"):
        conversions = {"E2M1.RS"} if Target(sm).isa == 100 else set()
    if constants["SCALE"] == "e8m0" and constants["CONTRACT"] == "rceil":
        conversions.add("E8")
    return conversions


def check(sm: int) -> Iterator[tuple[Checked, list[str]]]:
    """Compile every launch of every configuration, the same one once; what was found, and what is wrong with it."""
    seen = set()
    for configuration in CONFIGURATIONS:
        for launched in configuration.launches(sm):
            key = (launched.kernel.__name__, str(launched.args), str(launched.constants))
            if key in seen:
                continue
            seen.add(key)
            _, checked = _check(launched, configuration.label, configuration.format, sm)
            yield checked, checked.problems(expected_conversions(launched, sm))


def _check(launched: Launched, label: str, format: str, sm: int) -> tuple[object, Checked]:
    """(Triton's compiled kernel, what its machine code has)."""
    compiled = _compat.compile_ahead(launched.kernel, launched.args, launched.constants, launched.num_warps, sm)
    sass, usage = _disassemble(compiled.asm["cubin"])
    return compiled, Checked(
        kernel=launched.kernel.__name__, configuration=label, format=format, sm=sm,
        registers=int(re.search(r"REG:(\d+)", usage)[1]), shared=compiled.metadata.shared,
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        conversions=tuple(sorted(set(map("".join, _CONVERSION.findall(sass))))),
        wide_loads=len(re.findall(r"\bLDG\.E(?:\.\w+)*\.128", sass)),
        wide_stores=len(re.findall(r"\bSTG\.E(?:\.\w+)*\.128", sass)),
    )  # fmt: skip


@dataclass(frozen=True)
class Product:
    """A product of M rows by N x K weights. a: format of the activations; None keeps them in bf16.

    gated: with the epilogue silu(product) * another matrix. n: the library computes some products of a multiple of 16.
    weights: how many are multiplied by the same activations, in one launch.
    """

    a: str | None
    b: str
    m: int = 512
    gated: bool = False
    n: int = SIZE
    weights: int = 1
    k: int = SIZE

    @property
    def label(self) -> str:
        sizes = "x".join(map(str, (self.m, self.n, self.k)))
        return f"product, {sizes}" + ", gated" * self.gated + f", {self.weights} weights" * (self.weights > 1)

    @property
    def formats(self) -> str:
        return f"{self.a or 'bf16'} x {self.b}"

    def launches(self, sm: int) -> list[Launched]:
        """Every launch of the product; none where nothing computes it with the epilogue."""
        a, b = _operand(self.a, self.m, self.k), _operand(self.b, self.n, self.k)
        epilogue, gate = None, ()
        if self.gated:
            epilogue = Epilogue.parse(_GATED, torch.bfloat16, torch.bfloat16)
            gate = (torch.empty(self.m, self.n, dtype=torch.bfloat16, device="meta"),)
        with dry_run(Target(sm)) as launches:
            if self.gated and not choose(problem_of(a, b, None, torch.bfloat16, Target(sm))).takes_epilogue:
                return []
            if self.weights > 1:
                scaled_mm_group(a, [(b, None)] * self.weights, torch.bfloat16)
            else:
                scaled_mm(a, b, None, torch.bfloat16, epilogue, gate)
        return launches

    def launched(self, sm: int) -> Launched | None:
        """The launch of the product itself; None where the library computes it, or nothing with the epilogue."""
        return next((launch for launch in self.launches(sm) if launch.kernel.__name__.startswith("gem")), None)


_GATED = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]
PRODUCTS = (
    Product("nvfp4", "nvfp4"), Product("mxfp4", "mxfp4"), Product("mxfp8", "mxfp8", n=SIZE - 8),
    Product("mxfp8", "mxfp4"), Product(None, "nvfp4", 1), Product("nvfp4", "nvfp4", 8), Product(None, "nvfp4", 16),
    Product("nvfp4", "nvfp4", 32, n=4 * SIZE), Product(None, "nvfp4", 64),
    Product("mxfp8", "mxfp8", 16), Product("nvfp4", "nvfp4", gated=True), Product("mxfp8", "mxfp8", gated=True),
    Product(None, "nvfp4", 1, n=1024), Product(None, "nvfp4", 1, n=4096), Product(None, "nvfp4", 1, n=8192, k=28672),
    Product("nvfp4", "nvfp4", 1, n=2560, weights=3), Product(None, "nvfp4", 1, n=14336, k=4096, weights=2),
    Product(None, "nvfp4", 1, weights=2), Product(None, "nvfp4", 2, n=14336, k=28672, weights=2),
    Product(None, "nvfp4", 4, n=14336, k=4096, weights=2), Product(None, "nvfp4", 8, weights=3),
)  # fmt: skip


def _operand(name: str | None, rows: int, k: int) -> Operand:
    """An operand of meta tensors, with swizzled scales."""
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
    if name is None:
        return Operand(x)
    with dry_run(Target(0)):  # only the product is of interest
        return Operand(*kernels.quantize(x, formats.get(name), layout="swizzled"), formats.get(name))


def matrix_instruction(launched: Launched, sm: int) -> str:
    """The instruction that should make the sums, as a regular expression on the PTX."""
    constants = launched.constants
    if launched.kernel.__name__ != "gemm_block_scaled_sm100":
        return r"(mma\.sync\.aligned\.m16n8k16|wgmma\.mma_async|tcgen05\.mma)\S*\.?(f16|bf16)?"
    packed = constants["A_ELEMENT"] == constants["B_ELEMENT"] == "e2m1"
    kind = "mxf8f6f4" if not packed else "mxf4nvf4" if constants["SCALE"] == "e4m3" or sm >= 120 else "mxf4"
    return rf"{'mma.sync' if sm >= 120 else 'tcgen05.mma'}\S*kind::{kind}\.block_scale"


def check_products(sm: int) -> Iterator[tuple[Checked, list[str]]]:
    """The same of every product of `PRODUCTS`; instead of conversions, the matrix instructions."""
    for product in PRODUCTS:
        launched = product.launched(sm)
        if launched is None:
            continue
        compiled, checked = _check(launched, product.label, product.formats, sm)
        ptx = compiled.asm["ptx"]
        used = re.findall(r"((?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.\S+)", ptx)
        problems = [f"{checked.local_accesses} local-memory accesses"] if checked.local_accesses else []
        if not re.search(matrix_instruction(launched, sm), ptx):
            problems.append(f"no {matrix_instruction(launched, sm)}")
        if checked.shared > (101376 if sm >= 120 else 232448):
            problems.append(f"{checked.shared} bytes of shared memory")
        if (getattr(compiled.metadata, "tmem_size", None) or 0) > 512:
            problems.append(f"{compiled.metadata.tmem_size} columns of tensor memory")
        yield replace(checked, conversions=tuple(sorted(set(used)))), problems


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Machine code and resource usage of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("nvdisasm", "-c", file.name), _run("cuobjdump", "-res-usage", file.name)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_compat.cuda_tool(tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def add_command(commands) -> None:
    """Add `check-sm100` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("check-sm100", help="check the machine code of the kernels for SM100")
    parser.set_defaults(run=run)
    parser.add_argument("--sm", type=int, nargs="+", default=[100], help="compute capabilities, 100 for 10.0")


def run(args: argparse.Namespace) -> None:
    """Print a line a kernel; exit with status 1 if something is wrong."""
    line = "{:22} {:18} {:16} {:>4} {:>9} {:>7} {:>6} {:>5} {:>6}  {}"
    print(line.format("kernel", "configuration", "format", "sm", "registers", "shared", "spills", "LDG128", "STG128",
                      "instructions"))  # fmt: skip
    failed = False
    for sm in args.sm:
        for found, problems in itertools.chain(check(sm), check_products(sm)):
            failed |= bool(problems)
            notes = " ".join(found.conversions) + "".join(f"; {problem}" for problem in problems)
            print(line.format(found.kernel, found.configuration, found.format, found.sm, found.registers, found.shared,
                              found.local_accesses, found.wide_loads, found.wide_stores, notes))  # fmt: skip
    raise SystemExit(1 if failed else 0)
