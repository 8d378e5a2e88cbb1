"""What was quantised, what was not, and why: one row a matrix product."""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Row:
    """One matrix product of a compiled graph.

    module: fully qualified name of the layer. product: fprop, dgrad, wgrad, attention or other.
    m, n, k: its dimensions, as text where symbolic. left, right: format of each operand ("bfloat16" and the like
    where it stays as it is). tier: native, emulated or reference; None where the product is left alone.
    reason: why it is left alone; None where it is quantised. flops: 2 m n k, None where a dimension is symbolic.
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

    @property
    def quantised(self) -> bool:
        return self.reason is None


_HEAD: tuple[str, ...] = (
    "module", "product", "M", "N", "K", "left", "right", "tier", "saved", "left alone because"
)  # fmt: skip


@dataclass
class Report:
    """The rows of every graph that a backend compiled (or `explain` captured), in the order of compilation.

    counts: how often each pass matched, summed over the graphs. warned: whether "nothing quantised" was said.
    """

    recipe: str
    rows: list[Row] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    warned: bool = False

    def add(self, rows: list[Row], counts: dict[str, int]) -> None:
        """Take in the rows of one graph; a recompilation adds only what it has not seen."""
        known = set(self.rows)
        self.rows.extend(row for row in rows if row not in known)
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

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

    def flops_share(self) -> float | None:
        """Quantised share of the matrix FLOPs of known size; None where nothing is known."""
        total = sum(row.flops or 0 for row in self.rows)
        return sum(row.flops or 0 for row in self.quantised) / total if total else None

    def saved(self) -> tuple[int, int]:
        """Bytes of packed activations kept for the backward, and what they have unquantised."""
        return sum(row.saved or 0 for row in self.rows), sum(row.saved_plain or 0 for row in self.rows)

    def summary(self) -> str:
        """One line: how many products, what share of the FLOPs, how many of symbolic size are not in that share."""
        share = self.flops_share()
        line = f"recipe {self.recipe}: {len(self.quantised)} of {len(self.rows)} matrix products quantised"
        if share is not None:
            line += f", {share:.1%} of their FLOPs"
        unknown = sum(row.flops is None for row in self.rows)
        if unknown and share is not None:
            line += f" ({unknown} of symbolic or unknown size not counted)"
        packed, plain = self.saved()
        return line + (f"; saved for backward: {_size(packed)} packed, unquantised {_size(plain)}" if packed else "")

    def to_dict(self) -> dict:
        """JSON-able: recipe, rows, counts, summary figures."""
        return {
            "recipe": self.recipe,
            "rows": [asdict(row) for row in self.rows],
            "counts": dict(self.counts),
            "quantised": len(self.quantised),
            "flops_share": self.flops_share(),
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


def _cells(row: Row) -> tuple[str, ...]:
    saved = None if row.saved is None else f"{_size(row.saved)} of {_size(row.saved_plain)}"
    values = (
        row.module or "(top)", row.product, row.m, row.n, row.k, row.left, row.right, row.tier, saved, row.reason
    )  # fmt: skip
    return tuple("" if value is None else str(value) for value in values)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def rows_to_json(rows: list[Row], counts: dict[str, int]) -> str:
    return json.dumps({"rows": [asdict(row) for row in rows], "counts": counts})


def rows_from_json(text: str) -> tuple[list[Row], dict[str, int]]:
    stored = json.loads(text)
    return [Row(**row) for row in stored["rows"]], stored["counts"]
