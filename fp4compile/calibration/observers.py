"""`Observation`: run a model in the backend's captured graphs, and collect the activations of layers.

A layer may also run outside of these graphs, in functions that Dynamo does not capture; then its name is recorded.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile.analysis.find import parameters_of
from fp4compile.analysis.gemm import Gemm, GemmOperand, Input
from fp4compile.capture import run_captured
from fp4compile.formats.grouping import Groups
from fp4compile.report import names

aten = torch.ops.aten

# Takes a graph and its inputs; returns the forward matmuls to watch.
Choose = Callable[[Graph, tuple[Input, ...]], Iterable[Gemm]]
# Called with a watched matmul, both names of its layer (the one that rules match, and the full one), the parameter, the
# activation [..., K] as the matmul reads it, and the offsets of groups of its rows or the matrices' indices, or None.
See = Callable[[Gemm, set[str], torch.Tensor, torch.Tensor, torch.Tensor | None], None]


class Observation:
    """A model that passes the activations of layers to `see`; called like the model. choose: the layers."""

    def __init__(self, model: Callable, choose: Choose, see: See):
        self.choose, self.see = choose, see
        self.now: names.Names | None = None
        self.layers: dict[int, set[str]] = {}  # the names of the layers of each weight, by the weight's address
        self.outside = _Outside()
        self.run = run_captured(model, self._watched, lambda known, now: setattr(self, "now", now), joint=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.outside:
            return self.run(*args, **kwargs)

    def unseen(self) -> set[str]:
        """The names of the layers that have also run outside of the captured graphs."""
        return set().union(*(self.layers.get(address, ()) for address in self.outside.addresses))

    def ran_outside(self, weight: torch.Tensor) -> bool:
        """Whether a weight was also multiplied outside of the captured graphs."""
        return _address(weight) in self.outside.addresses

    def _watched(self, module: GraphModule, known: names.Names, _: int | None) -> Callable:
        """The graph with a call of `_saw` behind each matmul."""
        placeholders: dict[str | None, Node] = {
            name: node for node, name in parameters_of(module.graph, known.inputs).items()
        }
        for gemm in self.choose(module.graph, known.inputs):
            activation, weight = operands(gemm)

            def saw(*values: Any, gemm: Gemm = gemm) -> None:
                self._saw(gemm, *values)

            groups = gemm.index if gemm.offs is None else gemm.offs
            with module.graph.inserting_after(gemm.node):
                module.graph.call_function(saw, (placeholders[weight.parameter], activation.source, groups))
        graph = Interpreter(module)

        def run(*values: Any) -> Any:
            with self.outside.ignored():
                return graph.run(*values)

        return run

    def _saw(self, gemm: Gemm, weight: torch.Tensor, x: torch.Tensor, groups: torch.Tensor | None) -> None:
        """Pass a matmul's activation to `see`. weight: the parameter. x: the activation as the matmul reads it."""
        both = {gemm.module, gemm.module if self.now is None else self.now.full(gemm.module)}
        self.layers.setdefault(_address(weight), set()).update(both)
        operand, _ = operands(gemm)
        if operand.transposed == (operand is gemm.a):  # x @ W has the contraction last, and W @ x has it before
            x = x.mT
        self.see(gemm, both, weight, x.detach(), groups)


def operands(gemm: Gemm) -> tuple[GemmOperand, GemmOperand]:
    """(activation, weight) of a forward matmul."""
    first, second = (operand for operand in (gemm.a, gemm.b) if operand is not None)
    return (first, second) if first.role == "fprop_x" else (second, first)


def in_groups(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The rows of x that belong to a group; the others are arbitrary."""
    groups = Groups.of(offs, x.shape[-2])
    return x[groups.of_rows < groups.count]


# ---------------------------------------------------------------- outside of the captured graphs

_MULTIPLIES = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default, aten.addmv.default,
    aten.linear.default, aten.matmul.default, aten._grouped_mm.default,
    aten._to_copy.default,  # autocast's cast before a matmul
}  # fmt: skip


class _Outside(TorchDispatchMode):
    """Records the addresses of multiplied tensors while it is active, except inside `ignored`."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: Dynamo also captures graphs under this mode."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()
        self.active = True

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """A context in which no address is recorded."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and func in _MULTIPLIES:
            self.addresses |= {_address(value) for value in args if type(value) in (torch.Tensor, torch.nn.Parameter)}
        return func(*args, **(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
