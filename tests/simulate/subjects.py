"""Kernels that edits are planted in: small cases that use as much of each kernel as a large one would.

Persistent kernels are run by few programs, so that each takes several tiles and its buffers and phases go round. Sizes
leave parts of tiles empty in every direction, and a walk over tiles has more rows of tiles than it takes together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from fp4compile.check.product_table import PRODUCTS
from fp4compile.check.quantiser_table import CONFIGURATIONS, PROLOGUE_CONFIGURATIONS
from fp4compile.check.run_simulated import ENDS, ROWS, multiplied, quantized, quantized_after_steps
from fp4compile.check.simulate.launch import Compiled, Simulator
from fp4compile.check.simulate.parse import parse
from fp4compile.check.simulate.run import Kernel
from fp4compile.templates.launch import Launch

SM = 100


@dataclass(frozen=True)
class Subject:
    """A case of the simulator.

    check: returns what is wrong. programs: the most programs of a launch, for persistent kernels; 0 for all.
    """

    name: str
    check: Callable[[Simulator], list[str]]
    programs: int = 0


@dataclass
class Planted(Simulator):
    """A simulator in which one kernel has other code than Triton gave it.

    programs: as of `Subject`. code: the texts of all kernels that were launched, by name; of a kernel with several
    specialisations, the first one. edited: the kernel's name and its PTX, or None.
    """

    programs: int = 0
    edited: tuple[str, str] | None = None
    code: dict[str, str] = field(default_factory=dict)
    _kernel: Kernel | None = None

    def launch(self, launch: Launch) -> None:
        few = self.programs and min(int(launch.grid), self.programs)
        super().launch(replace(launch, grid=few) if few else launch)

    def compiled(self, launch: Launch) -> Compiled:
        made, name = super().compiled(launch), launch.kernel.__name__
        first = self.code.setdefault(name, made.ptx)
        if self.edited is None or name != self.edited[0] or made.ptx != first:
            return made
        if self._kernel is None:
            self._kernel = Kernel.of(parse(self.edited[1]))
        return replace(made, kernel=self._kernel)


def _product(name: str, label: str, programs: int = 0, **sizes: int) -> Subject:
    (of_gate,) = (one for one in PRODUCTS if f"{one.label} {one.formats}" == label)
    small = replace(of_gate, **sizes)
    return Subject(name, partial(multiplied, of_gate, small), programs)


def _quantised(name: str, label: str, rows: int, columns: int) -> Subject:
    (of_gate,) = (one for one in CONFIGURATIONS if f"{one.label}, {one.format}" == label)
    return Subject(name, partial(quantized, of_gate, (rows, columns)))


def _after_steps(name: str, label: str) -> Subject:
    (of_gate,) = (one for one in PROLOGUE_CONFIGURATIONS if f"{one.label}, {one.format}" == label)
    return Subject(name, partial(quantized_after_steps, of_gate))


_GROUPS = {"groups": len(ENDS)}
SUBJECTS = (
    _product("dense NVFP4", "512x8192x8192 nvfp4 x nvfp4", 2, m=1040, n=144, k=640),
    _product("dense MXFP8", "512x8192x8192 mxfp8 x mxfp8", 2, m=1040, n=144, k=320),
    _product("dense NVFP4 without TMA", "512x8192x8176 nvfp4 x nvfp4", 2, m=144, n=272, k=1520),
    _product("few rows, split K", "16x8192x8192 nvfp4 x nvfp4", n=272, k=2560),
    _product("groups of rows", "8192x2048x4096, 64 groups nvfp4 x nvfp4", 2, **_GROUPS, m=ROWS, n=272, k=640),
    _product("groups along K", "256x512x8192, 64 groups along K nvfp4 x nvfp4", 2, **_GROUPS, m=144, n=144, k=ROWS),
    _product("one row", "1x8192x8192 bf16 x nvfp4", 4, n=272, k=1536),
    _product("dequantised tiles", "64x8192x8192 bf16 x nvfp4", n=272, k=1536),
    _quantised("rows", "rows, nvfp4", 130, 400),
    _quantised("both directions, transform, seed", "both, transform, seed, nvfp4_te", 130, 400),
    _after_steps("a norm", "a norm, nvfp4_rowwise"),
)
