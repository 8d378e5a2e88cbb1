"""`Observation`: run a model in the backend's captured graphs, and collect the activations of layers.

A layer may also run outside of these graphs, in functions that Dynamo does not capture; then its name is recorded.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from fp4compile.analysis.find import parameters_of
from fp4compile.analysis.gemm import Gemm, GemmOperand, Input
from fp4compile.capture import run_captured
from fp4compile.formats.grouping import Groups
from fp4compile.report import names
from fp4compile.uncaptured import Uncaptured, storage_of

# Takes a graph and its inputs; returns the forward matmuls to watch.
Choose = Callable[[Graph, tuple[Input, ...]], Iterable[Gemm]]
# Called with a watched matmul, both names of its layer (the one that rules match, and the full one), the parameter, the
# activation [..., K] as the matmul reads it, and the offsets of groups of its rows or the matrices' indices, or None.
See = Callable[[Gemm, set[str], torch.Tensor, torch.Tensor, torch.Tensor | None], None]


class Observation:
    """A model whose calls also pass what its layers' matmuls read to `see`. It is called like the model.

    choose: picks the matmuls of each captured graph that are watched.
    """

    def __init__(self, model: Callable, choose: Choose, see: See):
        self.choose, self.see = choose, see
        self.now: names.Names | None = None
        self.layers: dict[int, set[str]] = {}  # the names of the layers of each weight, by the weight's storage
        self.outside = Uncaptured()
        self.run = run_captured(
            model, self._watched, lambda known, now: setattr(self, "now", now), joint=False,
            running=self.outside.ignored,
        )  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.outside:
            return self.run(*args, **kwargs)

    def unseen(self) -> set[str]:
        """The names of the layers that have also run outside of the captured graphs."""
        return set().union(*(self.layers.get(storage, ()) for storage in self.outside.storages))

    def ran_outside(self, weight: torch.Tensor) -> bool:
        """Whether a weight was also multiplied outside of the captured graphs."""
        return self.outside.recorded(weight)

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
        return Interpreter(module).run

    def _saw(self, gemm: Gemm, weight: torch.Tensor, x: torch.Tensor, groups: torch.Tensor | None) -> None:
        """Pass a matmul's activation to `see`. weight: the parameter. x: the activation as the matmul reads it."""
        both = {gemm.module, gemm.module if self.now is None else self.now.full(gemm.module)}
        self.layers.setdefault(storage_of(weight), set()).update(both)
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
