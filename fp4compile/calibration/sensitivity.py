"""`sensitivity`: how much each layer's quantisation changes the layer's output and the model's output.

Each captured graph has the quantised matmuls of every layer beside the original ones. An interpreter runs those of one
layer at a time: a batch takes one pass over the model, and one more per layer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from fp4compile.analysis.find import parameters_of
from fp4compile.analysis.gemm import Gemm
from fp4compile.analysis.plan import Decision
from fp4compile.calibration import batches as sample
from fp4compile.capture import run_captured
from fp4compile.formats.grouping import Grouping, Groups
from fp4compile.passes.manager import analyse
from fp4compile.passes.rewrite import insert
from fp4compile.recipe import Recipe, resolve
from fp4compile.report import names, page
from fp4compile.report.decibels import decibels
from fp4compile.report.product_row import one_line
from fp4compile.report.progress import with_bar
from fp4compile.report.report_view import Column, Line, ReportView
from fp4compile.report.text import to_text

_HEADER = ("layer", "weights", "its output, dB", "model's output, dB")


@dataclass(frozen=True)
class LayerSensitivity:
    """The effect of quantising one layer, in decibels of signal power over the power of the error (SQNR).

    layer: the name that rules match; layers with one name are one entry.
    weights: how many elements the layer's weights have.
    output_db: of the layer's output, with its input from the unquantised model.
    model_db: of the model's output, when only this layer is quantised.
    """

    layer: str
    weights: int
    output_db: float
    model_db: float

    @property
    def power(self) -> float:
        """The power of the error of the model's output over the power of its signal."""
        return 10 ** (-self.model_db / 10)


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The layers that a recipe quantises, ordered by their effect on the model's output, largest first.

    `print(sensitivity)` shows a table, and so does a notebook. `Recipe.with_budget` makes rules from it.
    """

    recipe: str
    layers: tuple[LayerSensitivity, ...]

    def worst(
        self, *, sqnr_db: float | None = None, share: float | None = None, fallback: "Sensitivity | None" = None
    ) -> tuple[str, ...]:
        """The names of the worst layers, by one of two budgets.

        sqnr_db: as few layers as possible, so that the model's output keeps at least so many decibels, with their
            errors under `fallback`, if there is one. Errors of layers count as independent: their powers add up.
        share: as many layers as possible, from the worst on, with at most this share (0 to 1) of all weights' elements.

        Raises ValueError unless exactly one of the two is set, for a share out of range, where `fallback` lacks a
        layer, and where it cannot keep so many decibels.
        """
        if sqnr_db is not None and share is None:
            return self._beyond(sqnr_db, fallback)
        if share is None or sqnr_db is not None:
            raise ValueError(f"sqnr_db={sqnr_db}, share={share}: expected one of the two budgets")
        if not 0 <= share <= 1:
            raise ValueError(f"share={share}: expected a number from 0 to 1")
        left, chosen = share * sum(one.weights for one in self.layers), []
        for one in self.layers:
            if one.weights <= left:
                left -= one.weights
                chosen.append(one.layer)
        return tuple(chosen)

    def _beyond(self, sqnr_db: float, fallback: "Sensitivity | None") -> tuple[str, ...]:
        """The fewest layers to skip or to give the fallback, so that the output keeps `sqnr_db` decibels."""
        if math.isnan(sqnr_db):
            raise ValueError(f"sqnr_db={sqnr_db}: expected a number")
        own = {one.layer: one.power for one in self.layers}
        others = dict.fromkeys(own, 0.0) | (
            {} if fallback is None else {one.layer: one.power for one in fallback.layers}
        )
        if fallback is not None and (absent := own.keys() - {one.layer for one in fallback.layers}):
            raise ValueError(f"fallback: recipe {fallback.recipe!r} was not measured on layer {min(absent)!r}")
        # The largest gains first. Where no error of a layer is left, that is the order of `layers`.
        chosen = sorted((name for name in own if own[name] > others[name]), key=lambda name: others[name] - own[name])
        for count in range(len(chosen) + 1):
            taken = chosen[:count]
            if decibels(1.0, math.fsum((others if name in taken else own)[name] for name in own)) >= sqnr_db:
                return tuple(taken)
        kept = decibels(1.0, math.fsum(min(own[name], others[name]) for name in own))
        raise ValueError(
            f"sqnr_db={sqnr_db}: with fallback {fallback.recipe if fallback else None!r} the model's output keeps at "
            f"most about {kept:.1f} dB; ask for less, or leave the layers unquantised (fallback=None)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary for JSON, with infinite decibels as text. `from_dict` makes an equal object."""
        return {"recipe": self.recipe, "layers": [
            {name: str(value) if value in (math.inf, -math.inf) else value for name, value in asdict(one).items()}
            for one in self.layers
        ]}  # fmt: skip

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Sensitivity":
        """The sensitivity in a dictionary of `to_dict`. Raises ValueError for anything else."""
        try:
            layers = [
                LayerSensitivity(
                    str(one["layer"]), int(one["weights"]), float(one["output_db"]), float(one["model_db"])
                )
                for one in content["layers"]
            ]
            return cls(str(content["recipe"]), tuple(layers))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"content: expected what Sensitivity.to_dict gives: {error!r}") from error

    def plot(self, path: str | Path) -> None:
        """Write a bar chart with two bars per layer. The path's ending sets the format (.png, .svg, .pdf).

        Raises ImportError without matplotlib, which `pip install fp4compile[plot]` installs.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot: needs matplotlib: pip install fp4compile[plot]") from error
        figure = Figure(figsize=(8, 1.5 + 0.3 * len(self.layers)), layout="constrained")
        axes = figure.subplots()
        places = range(len(self.layers))
        for name, height, values in (
            ("the model's output", -0.2, [one.model_db for one in self.layers]),
            ("the layer's output", 0.2, [one.output_db for one in self.layers]),
        ):
            finite = [value if math.isfinite(value) else 0.0 for value in values]
            axes.barh([place + height for place in places], finite, 0.4, label=name)
        axes.set_yticks(list(places), [one.layer or "(top)" for one in self.layers])
        axes.set_ylim(len(self.layers) - 0.5, -0.5)  # the worst at the top
        axes.set_xlabel(f"SQNR in dB with this layer alone under recipe {self.recipe}")
        axes.legend()
        figure.savefig(path)

    def __repr__(self) -> str:
        worst = f", the worst {one_line(self.layers[0].layer) or '(top)'!r}" if self.layers else ""
        return (
            f"<Sensitivity: recipe {one_line(self.recipe)}, {len(self.layers)} layers{worst}; print it for the table>"
        )

    def __str__(self) -> str:
        return to_text(self._view)

    def _repr_html_(self) -> str:
        return page.fragment(self._view)

    @property
    def _view(self) -> ReportView:
        """A table with a line for each layer."""
        together = decibels(1.0, math.fsum(one.power for one in self.layers))  # errors of all layers at once
        cells = ((one_line(one.layer) or "(top)", str(one.weights), f"{one.output_db:.1f}", f"{one.model_db:.1f}")
                 for one in self.layers)  # fmt: skip
        return ReportView(
            f"fp4compile, sensitivity to recipe {one_line(self.recipe)}",
            tuple(Column(name, numeric=place > 0) for place, name in enumerate(_HEADER)), tuple(map(Line, cells)),
            notes=(f"all together about {together:.1f} dB, if errors are independent",),
        )  # fmt: skip


def sensitivity(
    model: Callable,
    batches: Iterable[Any],
    recipe: str | dict | Recipe | Path | None = None,
    *,
    progress: bool = True,
) -> Sensitivity:
    """The effect of quantising each layer on the layer's and the model's output, worst layers first.

    For L layers, each batch takes L + 1 passes over the model. Nothing is compiled.

    model: a module or another callable that returns equal results at each call: in eval mode, and without changing its
        arguments. It runs uncompiled and without gradients.
    batches: an iterable of batches, as for `calibrate`.
    recipe: as for `fp4compile.backend`.
    progress: whether a terminal shows a progress bar, if the package tqdm is installed.

    All floating-point tensors of the output are compared as one vector, where the unquantised elements are finite.

    Raises ValueError for no batches, for a model of which the recipe quantises nothing, whose output has no
    floating-point tensor, no finite element or changing shapes; TypeError for a single batch and a model that cannot be
    called; the errors of `backend` for a bad recipe.
    """
    chosen = resolve(recipe)
    trials = _Trials(model, chosen)
    with torch.no_grad():
        for number, batch in enumerate(sample.over(batches), 1):
            expected = [tensor.clone() for tensor in trials.run(batch, None)]
            bar = f"sensitivity, batch {number}" if progress else None
            for layer in with_bar(list(trials.present), bar):
                trials.of_model[layer].add(expected, trials.run(batch, layer))
    if not trials.of_layer:
        raise ValueError(
            f"model: recipe {chosen.name!r} quantises nothing of it, or no graph of it was captured; "
            "fp4compile.explain shows which"
        )
    for layer, own in trials.of_layer.items():
        own.check(f"the output of layer {layer!r}")
        trials.of_model[layer].check("the model's output")
    found = [
        LayerSensitivity(layer, sum(trials.weights[layer].values()), own.decibels, trials.of_model[layer].decibels)
        for layer, own in trials.of_layer.items()
    ]
    return Sensitivity(chosen.name, tuple(sorted(found, key=lambda one: (one.model_db, one.output_db, one.layer))))


class _Error:
    """The power of a signal and of its error, summed over pairs of tensors.

    seen, compared: the number of elements, and the number of elements that are finite in the expected tensors.
    """

    def __init__(self) -> None:
        self.signal, self.error = 0.0, 0.0
        self.seen, self.compared = 0, 0

    def add(self, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        """Add pairs of tensors, where the expected ones are finite."""
        if [one.shape for one in expected] != [one.shape for one in found]:
            raise ValueError("model: the shapes of its output differ from one call to the next")
        for one, other in zip(expected, found, strict=True):
            finite = one.isfinite()
            signal = torch.where(finite, one, 0).float()
            error = torch.where(finite, other, 0).float() - signal
            self.signal += signal.square().sum(dtype=torch.float64).item()
            self.error += error.square().sum(dtype=torch.float64).item()
            self.seen += one.numel()
            self.compared += int(finite.sum().item())

    def check(self, what: str) -> None:
        """Raise ValueError where nothing could be compared. what: the tensors' owner, for the message."""
        if self.seen and not self.compared:
            raise ValueError(f"batches: {what} has no finite element, so nothing can be said of its error")

    @property
    def decibels(self) -> float:
        """SQNR in decibels: infinite without an error, minus infinite where the error is not finite."""
        return decibels(self.signal, self.error)


class _Trials:
    """Runs a model with one layer quantised, `now`.

    present: the layers that the last run entered. of_layer, of_model: the errors of each layer's and of the model's
    output.
    weights: the sizes of each layer's weights, by their addresses.
    """

    def __init__(self, model: Callable, recipe: Recipe):
        self.recipe = recipe
        self.present: dict[str, None] = {}
        self.of_layer: dict[str, _Error] = {}
        self.of_model: dict[str, _Error] = {}
        self.weights: dict[str, dict[int, int]] = {}
        self.now: str | None = None
        self.model = run_captured(model, self._captured, joint=False)

    def run(self, batch: Any, layer: str | None) -> list[torch.Tensor]:
        """The floating-point tensors of the model's output, with `layer` quantised, or no layer for None."""
        self.now, self.present = layer, {}
        with torch.random.fork_rng():  # all runs start with the same random state
            found = list(_floats(sample.call(self.model, batch)))
        if not found:
            raise ValueError("model: its output has no floating-point tensor to compare")
        return found

    def _captured(self, module: GraphModule, known: names.Names, _: int | None) -> Callable:
        decisions = [one for one in analyse(module.graph, self.recipe, known.inputs)
                     if one.reason is None and one.gemm.packed is None]  # fmt: skip
        layers: dict[str, list[Decision]] = {}
        for decision in decisions:
            layers.setdefault(decision.gemm.module, []).append(decision)
            for errors in (self.of_layer, self.of_model):
                errors.setdefault(decision.gemm.module, _Error())
            self.weights.setdefault(decision.gemm.module, {})
        both = _BothWays(module, parameters_of(module.graph, known.inputs), layers, self)

        def run(*values: Any) -> Any:
            self.present.update(dict.fromkeys(layers))
            return both.run(*values)

        return run


class _BothWays(Interpreter):
    """Runs a graph that has the quantised matmuls of all layers beside the original matmuls.

    inserted: node of a quantised matmul -> its layer. quantised: original matmul -> its layer, its quantised matmul,
    and its `Gemm`. holders: input -> the layers whose weight the input is.
    """

    def __init__(
        self, module: GraphModule, parameters: dict[Node, str], layers: dict[str, list[Decision]], trials: _Trials
    ):
        self.inserted: dict[Node, str] = {}
        self.quantised: dict[Node, tuple[str, Node, Gemm]] = {}
        self.holders: dict[Node, set[str]] = {}
        nodes = {name: node for node, name in parameters.items()}
        for layer, decisions in layers.items():
            before = set(module.graph.nodes)
            for decision, product in zip(decisions, insert(module.graph, decisions), strict=True):
                self.quantised[decision.gemm.node] = layer, product, decision.gemm
                for operand in (decision.gemm.a, decision.gemm.b):
                    if operand is not None and operand.parameter is not None:
                        self.holders.setdefault(nodes[operand.parameter], set()).add(layer)
            self.inserted |= {node: layer for node in module.graph.nodes if node not in before}
        self.trials = trials
        super().__init__(module)

    def run_node(self, node: Node) -> Any:
        layer = self.inserted.get(node)
        if layer is not None and layer != self.trials.now:
            return None
        value = super().run_node(node)
        for holder in self.holders.get(node, ()):
            self.trials.weights[holder][value.data_ptr()] = value.numel()
        if node in self.quantised:
            layer, product, gemm = self.quantised[node]
            other = self.env.pop(product)
            if gemm.groups is Grouping.RAGGED_ROWS:
                value = _grouped_rows(value, self.env[gemm.offs], -1 if gemm.swapped else -2)
            if layer == self.trials.now:
                self.trials.of_layer[layer].add([value], [other])
                return other
        return value


def _grouped_rows(value: torch.Tensor, offs: torch.Tensor, dim: int) -> torch.Tensor:
    """The result of a grouped matmul, with zeros in the rows along `dim` that belong to no group."""
    groups = Groups.of(offs, value.shape[dim])
    grouped = groups.of_rows < groups.count
    return torch.where(grouped if dim == -1 else grouped[:, None], value, 0)


def _floats(output: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of a model's output."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output.detach()
        return
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    elif is_dataclass(output):
        parts = [getattr(output, field.name) for field in fields(output)]
    for part in parts:
        yield from _floats(part)
