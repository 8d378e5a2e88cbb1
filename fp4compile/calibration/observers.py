"""`Observation`: run a model in the backend's captured graphs, and collect the activations of quantised layers.

A layer may also run outside of these graphs, in functions that Dynamo does not capture; then its name is recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile.analysis.find import find, parameters_of
from fp4compile.analysis.gemm import Gemm, GemmOperand, Input
from fp4compile.analysis.plan import Decision, plan
from fp4compile.capture import run_captured
from fp4compile.formats.grouping import Groups
from fp4compile.recipe import Recipe
from fp4compile.report import names

aten = torch.ops.aten

# Called with the names of a layer, the name of its activation's format, and an activation [..., K].
See = Callable[[set[str], str, torch.Tensor], None]


class Observation:
    """A model that passes the activations of layers with a static scale to `see`; called like the model.

    see: called with both names of a layer (the one that rules match, and the full one), the format and the activation.
    """

    def __init__(self, model: Callable, recipe: Recipe, see: See):
        self.recipe, self.see = recipe, see
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

    def _watched(self, module: GraphModule, known: names.Names, _: int | None) -> Callable:
        """The graph with a call of `_saw` behind each matmul."""
        placeholders: dict[str | None, Node] = {
            name: node for node, name in parameters_of(module.graph, known.inputs).items()
        }
        for decision in _with_static_scale(module.graph, self.recipe, known.inputs):
            gemm = decision.gemm
            activation, weight = _operands(gemm)

            def saw(*values: Any, decision: Decision = decision) -> None:
                self._saw(decision, *values)

            with module.graph.inserting_after(gemm.node):
                module.graph.call_function(saw, (placeholders[weight.parameter], activation.source, gemm.offs))
        graph = Interpreter(module)

        def run(*values: Any) -> Any:
            with self.outside.ignored():
                return graph.run(*values)

        return run

    def _saw(self, decision: Decision, weight: torch.Tensor, x: torch.Tensor, offs: torch.Tensor | None) -> None:
        """Pass a matmul's activation to `see`. weight: the parameter. x: the activation as the matmul reads it."""
        gemm = decision.gemm
        both = {gemm.module, gemm.module if self.now is None else self.now.full(gemm.module)}
        self.layers.setdefault(_address(weight), set()).update(both)
        operand, _ = _operands(gemm)
        if operand.transposed == (operand is gemm.a):  # x @ W has the contraction last, and W @ x has it before
            x = x.mT
        if offs is not None:  # rows of no group are arbitrary
            groups = Groups.of(offs, x.shape[-2])
            x = x[groups.of_rows < groups.count]
        # Only the activation has a static scale.
        format = next(t.format for t in (decision.a, decision.b) if t is not None and t.outer is not None)
        self.see(both, format, x.detach())


def _with_static_scale(graph: torch.fx.Graph, recipe: Recipe, inputs: tuple[Input, ...]) -> list[Decision]:
    gemms = find(graph, inputs)
    # Every layer has a scale here, so a layer that is quantised without one reads no static scale.
    scales = {gemm.module: 1.0 for gemm in gemms if gemm.product == "fprop"}
    decisions = plan(gemms, recipe.replace(static_scales=scales), inputs)
    return [d for d in decisions if any(t is not None and t.outer is not None for t in (d.a, d.b))]


def _operands(gemm: Gemm) -> tuple[GemmOperand, GemmOperand]:
    """(activation, weight) of a forward matmul."""
    first, second = (operand for operand in (gemm.a, gemm.b) if operand is not None)
    return (first, second) if first.role == "fprop_x" else (second, first)


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
