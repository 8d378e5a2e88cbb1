"""What was quantised, what was not, and why: one row a matrix product."""

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
    """One matrix product of a compiled graph.

    module: fully qualified name of the layer. product: fprop, dgrad, wgrad, attention or other.
    m, n, k: its dimensions, as text where symbolic. left, right: format of each operand ("bfloat16" and the like
    where it stays as it is). tier: native, emulated or reference; None where the product is left alone.
    reason: why it is left alone; None where it is quantised. flops: at the sizes of the call that was captured, where
    a size is symbolic; None where they are not known. category: one of CATEGORIES; experts are grouped products and
    batched ones with a parameter. name: the layer's name as rules see it, where that is not `module`: below the
    submodule that was compiled by itself. node: the product's node in the captured graph, as dumps show it.
    saved, saved_plain: of a wgrad, the bytes of packed activation kept for it between forward and backward, and what
    the activation has unquantised; None where nothing is (recomputed, kept for another layer with the same input).
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
    node: str | None = field(default=None, compare=False)

    @property
    def quantised(self) -> bool:
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
_HEAD: tuple[str, ...] = (
    "module", "product", "M", "N", "K", "left", "right", "tier", "saved", "left alone because"
)  # fmt: skip


@dataclass
class Report:
    """The rows of every graph that a backend compiled (or `explain` captured), in the order of compilation.

    counts: how often each pass matched, summed over the graphs. seconds: how long each pass took in this process, in
    sum; graphs from Inductor's cache take none. A pass that is switched off is in neither. graphs: how many were
    compiled; None where rows come from elsewhere. lost: of these, the graphs from Inductor's cache whose rows are not
    there any more.
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
        """Take in the rows of one graph, and the matches and times of its passes.

        trace: Dynamo's identity of the compilation. One that compiles a function once more adds only what the earlier
        ones of that function did not have.
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
        """After `torch.compiler.reset()` Dynamo numbers functions anew: what comes is no recompilation."""
        self._frames.clear()

    @property
    def quantised(self) -> list[Row]:
        return [row for row in self.rows if row.quantised]

    def reasons(self) -> dict[str, int]:
        """How many products each reason left alone."""
        counted: dict[str, int] = {}
        for row in self.rows:
            if row.reason is not None:
                counted[row.reason] = counted.get(row.reason, 0) + 1
        return counted

    def flops_share(self, category: str | None = None) -> float | None:
        """Quantised share of the matrix FLOPs that are known, of one category if given; None where none are."""
        rows = [row for row in self.rows if category in (None, row.category)]
        total = sum(row.flops or 0 for row in rows)
        return sum(row.flops or 0 for row in rows if row.quantised) / total if total else None

    def flops_shares(self) -> dict[str, float]:
        """`flops_share` of each category that has FLOPs."""
        shares = {category: self.flops_share(category) for category in CATEGORIES}
        return {category: share for category, share in shares.items() if share is not None}

    def saved(self) -> tuple[int, int]:
        """Bytes of packed activations kept for the backward, and what they have unquantised."""
        return sum(row.saved or 0 for row in self.rows), sum(row.saved_plain or 0 for row in self.rows)

    def summary(self) -> str:
        """One line: how many products, what share of the FLOPs, and of each category's where there are several."""
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
        """JSON-able: recipe, rows, counts, summary figures."""
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
        table = [_HEAD, *(_cells(row) for row in self.rows)]
        if not any(row.saved for row in self.rows):  # inference
            table = [(*line[:8], line[9]) for line in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join((lines[0], rule, *lines[1:], rule, self.summary()))


@dataclass
class _Frame:
    """A function that Dynamo compiled, once or more: the rows of the compilation that goes on, and those before it."""

    number: tuple[int, ...] | None = None
    rows: Counter = field(default_factory=Counter)
    earlier: Counter = field(default_factory=Counter)

    def enter(self, number: tuple[int, ...]) -> None:
        """A compilation may make several graphs; a higher number is another one."""
        if self.number is not None and number != self.number:
            self.earlier, self.rows = self.earlier | self.rows, Counter()
        self.number = number

    def is_new(self, row: Row) -> bool:
        self.rows[row] += 1
        return self.rows[row] > self.earlier[row]


def _cells(row: Row) -> tuple[str, ...]:
    saved = None if row.saved is None else f"{_size(row.saved)} of {_size(row.saved_plain)}"
    values = (
        _shown(row), row.product, row.m, row.n, row.k, row.left, row.right, row.tier, saved, row.reason
    )  # fmt: skip
    return tuple("" if value is None else str(value) for value in values)


def _shown(row: Row) -> str:
    """The full name, with that part in brackets which rules do not see."""
    if row.name is None:
        return row.module or "(top)"
    if is_below(row.name, row.module):
        return f"[{row.module.removesuffix(row.name)}]{row.name}"
    return f"{row.module} [rules: {row.name}]"


def is_below(name: str, path: str) -> bool:
    """Whether a dotted name is the whole or the last part of a path; the empty one is of any."""
    return name in ("", path) or path.endswith(f".{name}")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def rows_to_json(rows: list[Row], counts: dict[str, int]) -> str:
    return json.dumps({"rows": [asdict(row) for row in rows], "counts": counts})


def rows_from_json(text: str) -> tuple[list[Row], dict[str, int]]:
    stored = json.loads(text)
    return [Row(**row) for row in stored["rows"]], stored["counts"]
