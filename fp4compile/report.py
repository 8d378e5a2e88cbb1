"""What was quantised, what was not, and why: one `Row` for each matrix product, gathered in a `Report`."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from torch._guards import TraceId

CATEGORIES = ("dense", "experts", "attention", "convolution", "other")


class PassRun(NamedTuple):
    """What a pass did on one graph, or in sum on several: how many places it changed, and the seconds it took."""

    matches: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """One matrix product of a compiled graph: [m, k] times [k, n].

    module: fully qualified name of the layer; "" for a product outside of every layer.
    product: "fprop", "dgrad", "wgrad", "attention" or "other".
    m, n, k: the dimensions of the product; text where they are symbolic, None where they are not known.
    left, right: the format of each operand, or its dtype (such as "bfloat16") where it is not quantised; None where
        there is no such operand to name.
    tier: who computes the product: "native" (the GPU's block-scaled matrix units), "emulated" (other GPU kernels) or
        "reference" (PyTorch operations, on a CPU); None where the product is left alone.
    reason: why the product is left alone; None where it is quantised.
    flops: floating-point operations of one run. Where a size is symbolic, they are counted at the sizes of the call
        that was captured; None where they are not known.
    saved, saved_plain: of a wgrad, the bytes of packed activation that the forward pass keeps for it, and the bytes
        that this activation has unquantised. None where nothing is kept for this product: the activation is
        recomputed, or kept for another layer that has the same input.
    category: one of CATEGORIES. "experts" are grouped products, and batched products with a parameter.
    name: the layer's name as the rules of a recipe see it, where that differs from `module`: where a submodule was
        compiled by itself, rules see the name below it.
    note: in what a quantised product differs from what the recipe says, and why; None where it does not.
    weight_scales: how the block scales of the weight are chosen, where the recipe's `weight_scales` asks for another
        way than "amax": that way, or "amax (training)" in a graph that computes gradients; None elsewhere.
    node: the product's node in the captured graph, as graph dumps show it. It does not count when rows are compared.
    """

    module: str
    product: str
    m: int | str | None
    n: int | str | None
    k: int | str | None
    left: str | None
    right: str | None
    tier: str | None
    reason: str | None
    flops: int | None
    saved: int | None = None
    saved_plain: int | None = None
    category: str = "dense"
    name: str | None = None
    note: str | None = None
    weight_scales: str | None = None
    node: str | None = field(default=None, compare=False)

    @property
    def quantised(self) -> bool:
        """Whether the product is quantised."""
        return self.reason is None


_NO_GRAPH = (
    "what runs is not what is captured (a wrapper calls the original model, or `.module` or `._orig_mod` of the "
    "compiled one); compilation is switched off (TORCH_COMPILE_DISABLE, torch.compiler.disable); "
)
NOTHING_CAPTURED = f"Likely causes: {_NO_GRAPH}or the model does nothing to tensors."
NOTHING_COMPILED = (
    "Likely causes: a module of torch's own was compiled in place (nn.Sequential(...).compile(): Dynamo passes over "
    f"torch's own code; torch.compile(module, ...) works); {_NO_GRAPH}or the model was never called."
)
_HEADER: tuple[str, ...] = (
    "module", "product", "M", "N", "K", "left", "right", "tier", "weight scales", "saved", "left alone because"
)  # fmt: skip


@dataclass
class Report:
    """The rows of every graph that a backend compiled (or `explain` captured), in the order of compilation.

    `print(report)` shows a table of the rows and the line of `summary`.

    recipe: the name of the recipe.
    rows: one for each matrix product.
    counts: how often each pass matched, by the pass's name, summed over the graphs. A pass that is switched off is in
        neither `counts` nor `seconds`.
    graphs: how many graphs were compiled; None where the rows do not come from graphs (`fp4compile.pack_`).
    lost: how many of these graphs came from Inductor's cache when their rows no longer existed.
    seconds: how long each pass took in this process, summed over the graphs. A graph from Inductor's cache takes none.
    """

    recipe: str
    rows: list[Row] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    graphs: int | None = None
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    _frames: dict[tuple, "_Frame"] = field(default_factory=dict, repr=False, compare=False)

    def add(
        self,
        rows: list[Row],
        counts: Mapping[str, int],
        trace: TraceId | None = None,
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """Add the rows of one graph, and the match counts and times of its passes.

        trace: Dynamo's identity of the compilation. A recompilation of a function adds only rows that the earlier
            compilations of this function did not have. None adds all rows.
        """
        self.rows.extend(rows if trace is None else self._unseen(rows, trace))
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, took in (seconds or {}).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    @property
    def passes(self) -> dict[str, PassRun]:
        """Matches and seconds of each pass that ran, by its name, in the order of the passes."""
        return {name: PassRun(count, self.seconds.get(name, 0.0)) for name, count in self.counts.items()}

    def _unseen(self, rows: list[Row], trace: TraceId) -> list[Row]:
        compilation = trace.compile_id
        function = (compilation.compiled_autograd_id, compilation.frame_id)
        frame = self._frames.setdefault(function, _Frame())
        frame.enter((compilation.frame_compile_id, trace.attempt))
        return [row for row in rows if frame.is_new(row)]

    def forget_compilations(self) -> None:
        """Forget which functions were compiled: after `torch.compiler.reset()`, Dynamo numbers functions anew."""
        self._frames.clear()

    @property
    def quantised(self) -> list[Row]:
        """The rows of the products that are quantised."""
        return [row for row in self.rows if row.quantised]

    def reasons(self) -> dict[str, int]:
        """How many products were left alone for each reason."""
        counted: dict[str, int] = {}
        for row in self.rows:
            if row.reason is not None:
                counted[row.reason] = counted.get(row.reason, 0) + 1
        return counted

    def flops_share(self, category: str | None = None) -> float | None:
        """The quantised share (0 to 1) of the FLOPs that are known; None where none are.

        category: one of CATEGORIES, to count its products only.
        """
        rows = [row for row in self.rows if category in (None, row.category)]
        total = sum(row.flops or 0 for row in rows)
        return sum(row.flops or 0 for row in rows if row.quantised) / total if total else None

    def flops_shares(self) -> dict[str, float]:
        """The `flops_share` of each category that has FLOPs."""
        shares = {category: self.flops_share(category) for category in CATEGORIES}
        return {category: share for category, share in shares.items() if share is not None}

    def saved(self) -> tuple[int, int]:
        """(bytes of packed activations that are kept for the backward pass, bytes of these activations unquantised)."""
        return sum(row.saved or 0 for row in self.rows), sum(row.saved_plain or 0 for row in self.rows)

    def summary(self) -> str:
        """One line: how many products are quantised, their share of the FLOPs, and the share of each category."""
        if self.graphs == 0:
            return f"recipe {self.recipe}: compiled nothing. {NOTHING_COMPILED}"
        share, shares = self.flops_share(), self.flops_shares()
        line = f"recipe {self.recipe}: {len(self.quantised)} of {len(self.rows)} matrix products quantised"
        if share is not None:
            line += f", {share:.1%} of their FLOPs"
        if len(shares) > 1:
            line += f" ({', '.join(f'{category} {part:.1%}' for category, part in shares.items())})"
        unknown = sum(row.flops is None for row in self.rows)
        if unknown:
            line += f"; {unknown} of unknown size not counted"
        if self.lost:
            line += f"; rows of {self.lost} graphs from Inductor's cache are gone, and these not counted"
        packed, plain = self.saved()
        return line + (f"; saved for backward: {_size(packed)} packed, unquantised {_size(plain)}" if packed else "")

    def to_dict(self) -> dict:
        """The report as JSON takes it: recipe, rows, counts, and the figures of the summary."""
        return {
            "recipe": self.recipe,
            "rows": [asdict(row) for row in self.rows],
            "counts": dict(self.counts),
            "seconds": dict(self.seconds),
            "quantised": len(self.quantised),
            "flops_share": self.flops_share(),
            "flops_shares": self.flops_shares(),
            "graphs": self.graphs,
            "lost": self.lost,
            "saved": self.saved()[0],
            "saved_plain": self.saved()[1],
        }

    def __str__(self) -> str:
        table = [_HEADER, *(_cells(row) for row in self.rows)]
        for name, told in (("saved", "saved"), ("weight scales", "weight_scales")):
            if not any(getattr(row, told) for row in self.rows):
                table = [(*line[: (at := table[0].index(name))], *line[at + 1 :]) for line in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join((lines[0], rule, *lines[1:], rule, self.summary(), *self._notes(), *self._passes_line()))

    def _notes(self) -> list[str]:
        """A line for each note, with the layers that have it."""
        layers: dict[str, dict[str, None]] = {}
        for row in self.rows:
            if row.note is not None:
                layers.setdefault(row.note, {})[_shown(row)] = None
        return [f"{note}: {', '.join(names)}" for note, names in layers.items()]

    def _passes_line(self) -> list[str]:
        """A line with the matches of each pass, and its time where it is known."""
        told = (f"{name} {run.matches}" + f" ({1e3 * run.seconds:.1f} ms)" * (run.seconds > 0)
                for name, run in self.passes.items())  # fmt: skip
        return [f"passes: {', '.join(told)}"] if self.passes else []


@dataclass
class _Frame:
    """A function that Dynamo compiles, maybe several times.

    number: that of the compilation under way. rows: how often each row is in it. earlier: the same for the compilations
    before it, of each row the largest count.
    """

    number: tuple[int, ...] | None = None
    rows: Counter = field(default_factory=Counter)
    earlier: Counter = field(default_factory=Counter)

    def enter(self, number: tuple[int, ...]) -> None:
        """Begin a compilation if the number is a new one. One compilation may make several graphs, under one number."""
        if self.number is not None and number != self.number:
            self.earlier, self.rows = self.earlier | self.rows, Counter()
        self.number = number

    def is_new(self, row: Row) -> bool:
        """Count a row, and return whether the compilation under way now has it more often than each earlier one."""
        self.rows[row] += 1
        return self.rows[row] > self.earlier[row]


def _cells(row: Row) -> tuple[str, ...]:
    saved = None if row.saved is None else f"{_size(row.saved)} of {_size(row.saved_plain or 0)}"
    values = (
        _shown(row), row.product, row.m, row.n, row.k, row.left, row.right, row.tier, row.weight_scales, saved,
        row.reason,
    )  # fmt: skip
    return tuple("" if value is None else str(value) for value in values)


def _shown(row: Row) -> str:
    """The full name of the layer, with the part in brackets that rules do not see."""
    if row.name is None:
        return row.module or "(top)"
    if is_below(row.name, row.module):
        return f"[{row.module.removesuffix(row.name)}]{row.name}"
    return f"{row.module} [rules: {row.name}]"


def is_below(name: str, path: str) -> bool:
    """Whether a dotted name is the whole or the last part of a path; the empty name is, of every path."""
    return name in ("", path) or path.endswith(f".{name}")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def rows_to_json(rows: list[Row], counts: dict[str, int]) -> str:
    """One line of JSON with the rows and the match counts of a graph."""
    return json.dumps({"rows": [asdict(row) for row in rows], "counts": counts})


def rows_from_json(text: str) -> tuple[list[Row], dict[str, int]]:
    """(rows, match counts) of what `rows_to_json` wrote."""
    stored = json.loads(text)
    return [Row(**row) for row in stored["rows"]], stored["counts"]
