"""Compile the launches of `quantisers` and `products`, and compare their machine code with `bounds`."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fp4compile import _compat
from fp4compile.check import products, quantisers, resources
from fp4compile.check.bounds import PRODUCT_LINES, instruction_kind, instruction_line, judges_figures, product_line
from fp4compile.check.products import MatmulCase, multiplies
from fp4compile.check.ptx import Ptx
from fp4compile.check.quantisers import Configuration
from fp4compile.check.sass import Sass, disassemble, encoded_instructions, hazards
from fp4compile.hardware import Target
from fp4compile.templates.launch import Launch


@dataclass(frozen=True)
class Resources:
    """A launch's use of a multiprocessor.

    registers: registers of a thread. shared: a program's bytes of shared memory. tensor_columns: a program's columns of
    tensor memory. spills: accesses of local memory. programs: how many programs a multiprocessor holds. occupancy: the
    share of its warps that they fill.
    """

    registers: int
    shared: int
    tensor_columns: int
    spills: int
    programs: int
    occupancy: float

    @property
    def problems(self) -> list[str]:
        found = [f"{self.spills} local-memory accesses"] if self.spills else []
        if not self.programs:
            found.append(f"{self.shared} bytes of shared memory, {self.tensor_columns} columns of tensor memory and "
                         f"{self.registers} registers: no program fits a multiprocessor")  # fmt: skip
        return found


@dataclass(frozen=True)
class CodeRow:
    """One launch. kernel: its name. configuration, format: from the matmuls. sm: the compute capability.

    problems: the bounds that it misses. resources: None where it did not compile. unjudged: numbers beyond bounds that
    another version of the compiler set (`bounds.COMPILER`); they are no problems.
    """

    kernel: str
    configuration: str
    format: str
    sm: int
    problems: tuple[str, ...] = ()
    resources: Resources | None = None
    unjudged: tuple[str, ...] = field(default=(), kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, with the fields of `resources` at top level."""
        values = asdict(self)
        values.update(values.pop("resources") or {})
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class QuantizeRow(CodeRow):
    """A launch of a quantiser.

    instructions: thread instructions per 16 elements. budget: the instructions for which the bandwidth leaves time.
    line: the bound of `instructions`. conversions: the element and scale types to which instructions convert. loads,
    stores: bytes of the widest load and store.
    """

    instructions: float = 0.0
    budget: float = 0.0
    line: float = 0.0
    conversions: tuple[str, ...] = ()
    loads: int = 0
    stores: int = 0


@dataclass(frozen=True)
class ProductRow(CodeRow):
    """A launch of a matmul.

    line: the name of its bounds. instruction: the matrix instructions. scale_copies, tma_loads, asynchronous_loads,
    matrix_loads: numbers of instructions. waits: mbarrier waits in the main loop. overlapped: whether loads and
    matmuls of the main loop run at the same time; why: the reason. stores: bytes of the narrowest store of the result,
    or "TMA".
    """

    line: str = ""
    instruction: tuple[str, ...] = ()
    scale_copies: int = 0
    tma_loads: int = 0
    asynchronous_loads: int = 0
    matrix_loads: int = 0
    waits: int = 0
    overlapped: bool = False
    why: str = ""
    stores: int | str = 0


@dataclass(frozen=True)
class CompiledLaunch:
    """A compiled launch. compiled: Triton's compiled kernel."""

    launched: Launch
    compiled: Any
    sass: Sass
    sm: int

    @property
    def resources(self) -> Resources:
        metadata = self.compiled.metadata
        columns = getattr(metadata, "tmem_size", None) or 0
        # Partitions of a warp-specialised kernel have additional warps, which only the metadata counts.
        warps = max(metadata.num_warps, self.launched.num_warps)
        held = resources.programs(self.sm, warps, self.sass.registers, metadata.shared, columns)
        return Resources(self.sass.registers, metadata.shared, columns, self.sass.local_accesses, held,
                         resources.occupancy(self.sm, warps, held))  # fmt: skip

    @property
    def problems(self) -> tuple[str, ...]:
        found, lost = [], self.sass.lost_values
        if lost:
            found.append(f"ptxas lost {len(lost)} values, the first of {lost[0]}")
        early = hazards(encoded_instructions(self.sass.encoded)) if "LDTM" in self.sass.text else []
        if early:
            found.append(f"{len(early)} uses of tensor memory before its load ends, the first: {early[0]}")
        return tuple(found)


def compile_launch(launched: Launch, sm: int) -> CompiledLaunch:
    """Compile a launch for a GPU, local or not. Raises the errors of Triton and ptxas."""
    compiled = _compat.compile_ahead(
        launched.kernel, launched.args, launched.constants, launched.num_warps, sm, launched.num_stages,
        launched.num_ctas,
    )  # fmt: skip
    return CompiledLaunch(launched, compiled, disassemble(compiled.asm["cubin"]), sm)


def _signature(launched: Launch) -> tuple:
    return launched.kernel.__name__, str(launched.args), str(launched.constants), launched.num_warps


# ---------------------------------------------------------------- quantising


def check_quantize(sm: int, configurations: tuple[Configuration, ...] | None = None) -> Iterator[QuantizeRow]:
    """A row for every launch of every configuration, equal launches once. None: all tables of `quantisers`."""
    seen = set()
    for configuration in quantisers.ALL_CONFIGURATIONS if configurations is None else configurations:
        for launched in configuration.launches(sm):
            if _signature(launched) not in seen:
                seen.add(_signature(launched))
                yield quantize_row(configuration, launched, sm)


def quantize_row(configuration: Configuration, launched: Launch, sm: int) -> QuantizeRow:
    """The row of one launch of a configuration."""
    where = (launched.kernel.__name__, configuration.label, configuration.format)
    try:
        one = compile_launch(launched, sm)
    except Exception as error:
        return QuantizeRow(*where, sm, (_does_not_compile(error),))
    budget = resources.instruction_budget(sm, bytes_moved(launched) / _sixteens(configuration))
    found = QuantizeRow(
        *where, sm, resources=one.resources,
        instructions=_instructions(one, configuration), budget=budget, line=instruction_line(*where, sm, budget),
        conversions=tuple(sorted(set(map("".join, _CONVERSION.findall(one.sass.text))))),
        loads=max(one.sass.widths("LDG"), default=0), stores=max(one.sass.widths("STG"), default=0),
    )  # fmt: skip
    return _with_figures(replace(found, problems=one.problems + _quantize_problems(found, launched)))


def bytes_moved(launched: Launch) -> int:
    """The bytes of a launch's tensors, each read or written once."""
    tensors = {id(value): value for value in launched.args.values() if isinstance(value, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _sixteens(configuration: Configuration) -> float:
    rows, columns = configuration.shape
    return rows * columns / 16


def _instructions(one: CompiledLaunch, configuration: Configuration) -> float:
    trips, idle = configuration.trips(one.launched), configuration.idle_programs(one.launched)
    executed = one.sass.executed(trips) * (one.launched.grid - idle)
    if idle:
        executed += one.sass.executed(trips, idle=True) * idle
    return executed * 32 * one.launched.num_warps / _sixteens(configuration)


# The element or scale type, and .RS where the conversion rounds stochastically.
_CONVERSION = re.compile(r"F2FP\.SATFINITE\.(E\dM\d|E8)\.(?:F32|BF16)\S*?(\.RS)?\s")


def expected_conversions(launched: Launch, sm: int) -> set[str]:
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


def _quantize_problems(found: QuantizeRow, launched: Launch) -> tuple[str, ...]:
    problems = list(found.resources.problems) if found.resources else []
    if missing := expected_conversions(launched, found.sm) - set(found.conversions):
        problems.append(f"no conversion to {', '.join(sorted(missing))}")
    # The kernels of columns load 4 or 8 bytes for each thread, whole lines for each warp: wider loads cost registers.
    narrow_loads = found.loads < 16 and not found.kernel.endswith("_columns")
    # A thread of the scale sweep holds one block: eight bytes of codes.
    one_block = found.kernel == "sweep_scales"
    # A row of a tile of swizzled scales is four bytes.
    narrow_stores = found.stores < (4 if found.kernel == "lay_out_scales" else 8 if one_block else 16)
    if narrow_loads or (narrow_stores and not found.kernel.endswith(("_amax", "_statistics"))):
        problems.append("no 16-byte global accesses")
    return tuple(problems)


def _with_figures(found: QuantizeRow) -> QuantizeRow:
    """The row with an excess of instructions as a problem, or as `unjudged` under another compiler version."""
    if found.sm < 100 or found.instructions <= found.line:
        return found
    beyond = f"{found.instructions:.0f} instructions for 16 elements, of {found.line:.0f}"
    if judges_figures():
        return replace(found, problems=(*found.problems, beyond))
    return replace(found, unjudged=(beyond,))


# ---------------------------------------------------------------- matmuls


def check_products(sm: int, chosen: tuple[MatmulCase, ...] | None = None) -> Iterator[ProductRow]:
    """A row for every launch of every matmul, equal launches of a matmul once. None: `products.PRODUCTS`."""
    for product in products.PRODUCTS if chosen is None else chosen:
        tier, launched = product.launches(sm)
        for each in {_signature(each): each for each in launched}.values():
            yield product_row(product, tier, each, sm)


def product_row(product: MatmulCase, tier: str, launched: Launch, sm: int) -> ProductRow:
    """The row of one launch of a matmul."""
    positions = bool(product.groups) and launched.num_ctas == 1  # the 2-CTA kernel stores only the result
    tiles = product.m > 64 and _aligned(product)
    line = product_line(tier, tiles, sm, multiplies(launched), positions or bool(product.result))
    where = (launched.kernel.__name__, product.label, product.formats, sm)
    try:
        one = compile_launch(launched, sm)
    except Exception as error:
        return ProductRow(*where, (_does_not_compile(error),), line=line)
    ptx = Ptx(one.compiled.asm["ptx"])
    found = ProductRow(
        *where, resources=one.resources, line=line, instruction=ptx.products,
        scale_copies=ptx.count(r"tcgen05\.cp"), tma_loads=ptx.tma_loads, asynchronous_loads=ptx.asynchronous_loads,
        matrix_loads=ptx.count("ldmatrix"), waits=ptx.waits, overlapped=ptx.overlap.overlapped,
        why=ptx.overlap.why, stores=_stores(one.sass, ptx),
    )  # fmt: skip
    return replace(found, problems=one.problems + _product_problems(found, product))


def _aligned(product: MatmulCase) -> bool:
    """Whether the rows of codes of both operands are multiples of 16 bytes, as TMA and the libraries need them."""
    x = product.arguments()
    return all(each.data.shape[-1] * each.data.element_size() % 16 == 0 for each in (x.a, x.b))


def _stores(sass: Sass, ptx: Ptx) -> int | str:
    widths = sass.widths("STG")
    return min(widths) if widths else "TMA" if ptx.tma_stores else 0


def _product_problems(found: ProductRow, product: MatmulCase) -> tuple[str, ...]:
    problems = list(found.resources.problems) if found.resources else []
    if found.sm < 100:
        return tuple(problems)
    line = PRODUCT_LINES[found.line]
    wanted = line.instruction.replace("{kind}", instruction_kind(product.a, product.b, found.sm))
    if not any(re.match(wanted, each) for each in found.instruction or ("",)):
        problems.append(f"no {wanted}")
    for name, what in (("scale_copies", "tcgen05.cp"), ("tma_loads", "TMA loads"),
                       ("asynchronous_loads", "asynchronous loads"), ("matrix_loads", "ldmatrix")):  # fmt: skip
        if getattr(found, name) < getattr(line, name):
            problems.append(f"{getattr(found, name)} {what}")
    if line.overlapped and not found.overlapped:
        problems.append(f"the main loop does not overlap: {found.why}")
    whole = 2 * product.n % line.store_bytes == 0 if line.store_bytes else False
    if whole and found.stores != "TMA" and int(found.stores) < line.store_bytes:
        problems.append(f"stores of {found.stores} bytes, of {line.store_bytes}")
    return tuple(problems)


def _does_not_compile(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return f"does not compile: {type(error).__name__}: {said}"[:300]
