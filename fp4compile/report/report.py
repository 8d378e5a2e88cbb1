"""What was quantised, what was not, and why: one `Row` for each matrix product, gathered in a `Report`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from torch._guards import TraceId

from fp4compile.recipe.rules import Rule, unmatched
from fp4compile.report import page
from fp4compile.report.product_row import CATEGORIES, Row, is_below, one_line, shown_name
from fp4compile.report.row_classes import Group, by_layer, gain, groups, layer_name
from fp4compile.roofline.time_terms import GraphLaunches

__all__ = ["CATEGORIES", "PassRun", "Report", "Row", "is_below"]


class Seconds(NamedTuple):
    """Predicted seconds of what a graph launches for no matrix product, in bf16 and as it is planned."""

    plain_seconds: float
    seconds: float


class PassRun(NamedTuple):
    """A pass's matches and seconds on one graph, or summed over several graphs."""

    matches: int
    seconds: float


_NO_GRAPH = (
    "what runs is not what is captured (a wrapper calls the original model, or `.module` or `._orig_mod` of the "
    "compiled one); compilation is switched off (TORCH_COMPILE_DISABLE, torch.compiler.disable); "
)
_CURE = (
    "uncompiled: other recipes or shapes compiled the same code before. By default the ninth recipe in one process "
    "compiles nothing (torch._dynamo.config.recompile_limit=8): call torch.compiler.reset() between recipes, or raise "
    "the limit"
)
NOTHING_CAPTURED = f"Likely causes: {_NO_GRAPH}or the model does nothing to tensors."
NOTHING_COMPILED = (
    "Likely causes: a module of torch's own was compiled in place, or in DistributedDataParallel (an nn.Sequential: "
    f"Dynamo passes over torch's own code; put it into a module of your own); {_NO_GRAPH}"
    f"another backend reached Dynamo's limit of recompilations, and the code is left {_CURE}; "
    "or the model was never called."
)
_HEADER: tuple[str, ...] = (
    "module", "product", "M", "N", "K", "left", "right", "tier", "weight scales", "fused", "saved", "bf16, us",
    "planned, us", "gain", "launches", "left alone because",
)  # fmt: skip
_OPTIONAL = ("weight scales", "fused", "saved", "bf16, us", "planned, us", "gain", "launches")


@dataclass
class Frame:
    """A function that Dynamo compiles, maybe several times.

    number: the current compilation's number. rows: how often each row occurs in the current compilation. earlier: the
    largest such count of each row among the earlier compilations.
    """

    number: tuple[int, ...] | None = None
    rows: Counter = field(default_factory=Counter)
    earlier: Counter = field(default_factory=Counter)

    def enter(self, number: tuple[int, ...]) -> None:
        """Begin a compilation if the number is new. One compilation may make several graphs under one number."""
        if self.number is not None and number != self.number:
            self.earlier, self.rows = self.earlier | self.rows, Counter()
        self.number = number

    def is_new(self, row: Row) -> bool:
        """Count a row, and return whether the current compilation has it more often than each earlier one."""
        self.rows[row] += 1
        return self.rows[row] > self.earlier[row]


@dataclass(repr=False)
class Report:
    """The rows of every graph that a backend compiled (or `explain` captured), in the order of compilation.

    `print(report)` shows the `table` of the rows, with equal layers on one line, and the line of `summary`. A notebook
    shows the same as HTML.

    recipe: the name of the recipe.
    rows: one for each matrix product.
    counts: how often each pass matched, by the pass's name, summed over the graphs. `counts` and `seconds` lack passes
        that are switched off.
    graphs: how many graphs were compiled; None where the rows do not come from graphs (`fp4compile.pack_`).
    lost: how many of these graphs came from Inductor's cache when their rows no longer existed.
    seconds: how long each pass took in this process, summed over the graphs. A graph from Inductor's cache adds none.
    gpu: the name of the GPU for which the rows' times are predicted; None where no times are predicted.
    rest: the predicted times of all else in these graphs: norms, activations, embeddings and the like.
    uncompiled: for each function that Dynamo no longer compiles for new inputs, the limit in `torch._dynamo.config`
        that was reached.
    rules: the recipe's rules, where the report is a backend's or of `explain`; see `unmatched_rules`.
    packed_before: how many weights of the model were packed already when `fp4compile.pack_` was called.
    launches: what is launched for each graph with matrix products, on the GPU, without CUDA graphs; see `host_bound`.
    """

    recipe: str
    rows: list[Row] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    graphs: int | None = None
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    gpu: str | None = None
    rest: Seconds = Seconds(0.0, 0.0)
    uncompiled: dict[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    packed_before: int = 0
    launches: list[GraphLaunches] = field(default_factory=list, compare=False)
    _frames: dict[tuple, Frame] = field(default_factory=dict, repr=False, compare=False)

    def add(
        self,
        rows: list[Row],
        counts: Mapping[str, int],
        trace: TraceId | None = None,
        *,
        seconds: Mapping[str, float] | None = None,
        rest: Seconds | None = None,
        launches: GraphLaunches | None = None,
    ) -> None:
        """Add the rows of one graph, and the match counts and times of its passes.

        trace: Dynamo's identity of the compilation. A recompilation of a function adds only rows that the earlier
            compilations of this function did not have. None adds all rows.
        rest: the graph's `Report.rest`; added where rows are, or where the graph has none.
        launches: what is launched for the graph; None where that is not known, or is issued as a CUDA graph.
        """
        added = rows if trace is None else self._unseen(rows, trace)
        self.rows.extend(added)
        if rest is not None and (added or not rows):
            self.rest = Seconds(self.rest.plain_seconds + rest.plain_seconds, self.rest.seconds + rest.seconds)
        if launches is not None and rows:
            self.launches.append(launches)
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
        frame = self._frames.setdefault(function, Frame())
        frame.enter((compilation.frame_compile_id, trace.attempt))
        return [row for row in rows if frame.is_new(row)]

    def complete(
        self, rows: list[Row], fused: Mapping[str, str], before: GraphLaunches | None, after: GraphLaunches | None
    ) -> None:
        """Set `fused` in the report's rows, by node name, after a backward graph was compiled late.

        before, after: what is launched for the graph, without and with this backward graph.
        """
        if before is not None and after is not None and before in self.launches:
            self.launches[self.launches.index(before)] = after
        changed = {(row, row.node): text for row in rows if (text := fused.get(row.node or "")) is not None}
        self.rows = [
            replace(row, fused=changed[row, row.node]) if (row, row.node) in changed else row for row in self.rows
        ]

    def forget_compilations(self) -> None:
        """Forget which functions were compiled: after `torch.compiler.reset()`, Dynamo numbers functions anew."""
        self._frames.clear()
        self.uncompiled.clear()

    @property
    def quantised(self) -> list[Row]:
        """The rows of the products that are quantised."""
        return [row for row in self.rows if row.quantised]

    def reasons(self) -> dict[str, int]:
        """How many products were left alone for each reason."""
        return dict(Counter(row.reason for row in self.rows if row.reason is not None))

    def unmatched_rules(self) -> tuple[Rule, ...]:
        """The rules that decided about no product of all graphs so far.

        Empty while the report cannot know: before the first graph, and where it lacks the rows of a graph or functions
        run uncompiled.
        """
        if not self.graphs or self.lost or self.uncompiled:
            return ()
        return unmatched(self.rules, (row.module if row.name is None else row.name for row in self.rows))

    def flops_share(self, category: str | None = None) -> float | None:
        """The quantised share (0 to 1) of the known FLOPs; None where no FLOPs are known.

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
        """(bytes of packed activations saved for the backward pass, bytes of these activations unquantised)."""
        return sum(row.saved or 0 for row in self.rows), sum(row.saved_plain or 0 for row in self.rows)

    def summary(self) -> str:
        """One line: how many products are quantised, their share of the FLOPs, and the share of each category."""
        recipe = one_line(self.recipe)
        if self.graphs == 0:
            return f"recipe {recipe}: compiled nothing. {self._limit_line() or NOTHING_COMPILED}"
        share, shares = self.flops_share(), self.flops_shares()
        line = f"recipe {recipe}: {len(self.quantised)} of {len(self.rows)} matrix products quantised"
        if share is not None:
            line += f", {share:.1%} of their FLOPs"
        if len(shares) > 1:
            line += f" ({', '.join(f'{category} {part:.1%}' for category, part in shares.items())})"
        unknown = sum(row.flops is None for row in self.rows)
        if unknown:
            line += f"; {unknown} of unknown size not counted"
        if self.uncompiled:
            line += "; what runs uncompiled is not counted"
        if self.lost:
            line += f"; rows of {self.lost} graphs from Inductor's cache are gone, and these not counted"
        if self.packed_before:
            line += f"; {self.packed_before} packed already, and not counted"
        if idle := self.unmatched_rules():
            line += f"; rules that decided about no product: {', '.join(repr(rule.pattern) for rule in idle)}"
        packed, plain = self.saved()
        return line + (f"; saved for backward: {_size(packed)} packed, unquantised {_size(plain)}" if packed else "")

    def to_dict(self) -> dict:
        """The report as a dictionary for JSON: recipe, rows, counts, and the figures of the summary."""
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
            "gpu": self.gpu,
            "uncompiled": dict(self.uncompiled),
            "unmatched_rules": [rule.pattern for rule in self.unmatched_rules()],
            "packed_before": self.packed_before,
            "gains": self.gains(),
            "losing": self.losing(),
            "host_bound": [
                {"launches": graph.count, "host_seconds": graph.host_seconds, "seconds": graph.seconds}
                for graph in self.host_bound()
            ],
            "rest": None if self.gpu is None else self.rest._asdict(),
        }

    def __repr__(self) -> str:
        quantised = f"{len(self.quantised)} of {len(self.rows)} matrix products quantised"
        return f"<Report: recipe {one_line(self.recipe)}, {quantised}; print it for the table>"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        header, cells = self._lines(all=False)
        return page.groups_fragment(self._title(), groups(self.rows), header, cells, "\n".join(self._notes()))

    def table(self, *, all: bool = False) -> str:
        """The rows and the summary as text. Layers whose names differ only in numbers are one line, largest first.

        Unprintable characters of names are escaped.

        all: one line for each row instead, in the order of compilation.
        """
        header, cells = self._lines(all)
        table = [header, *cells]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join((lines[0], rule, *lines[1:], rule, *self._notes()))

    def to_csv(self) -> str:
        """All rows as CSV, with the names of the fields of `Row` in the first line.

        A text that a spreadsheet would take for a formula has an apostrophe in front.
        """
        return page.to_csv(self.rows)

    def to_html(self) -> str:
        """The table as one HTML page that needs no other file; with bars where times are predicted."""
        return page.to_html(self._title(), self._repr_html_())

    def _title(self) -> str:
        return one_line(f"fp4compile, recipe {self.recipe}") + (f", predicted on {self.gpu}" if self.gpu else "")

    def gains(self) -> dict[str, float]:
        """The predicted speed-up over bf16 of each quantised layer, all its products together.

        Equal layers are one entry, as in the table. Layers without a prediction are left out.
        """
        found = {}
        for rows in by_layer(self.rows):
            expected = gain(rows) if any(row.quantised for row in rows) else None
            if expected is not None:
                found[layer_name(rows)] = expected
        return found

    def losing(self) -> dict[str, float]:
        """The predicted speed-up of each layer that would be faster in bf16, even where others stay as they are.

        A launch that another layer needs too runs anyway, so it is not counted here.
        """
        found = {}
        for rows in by_layer(self.rows):
            alone = [replace(row, seconds=None if row.seconds is None else row.seconds - (row.shared_seconds or 0))
                     for row in rows]  # fmt: skip
            expected = gain(alone) if any(row.quantised for row in rows) else None
            if expected is not None and expected < 1:
                found[layer_name(rows)] = expected
        return found

    def host_bound(self) -> list[GraphLaunches]:
        """The launches of each graph that the host is predicted to issue more slowly than the GPU runs them.

        CUDA graphs (`torch.compile(..., mode="reduce-overhead")`) issue them at once. Empty where graphs use these.
        """
        return [graph for graph in self.launches if graph.host_binds]

    def predicted(self) -> Seconds | None:
        """The predicted seconds of all graphs, in bf16 and as planned: the sum of the rows and of `rest`.

        None without predictions.
        """
        timed = [row for row in self.rows if row.seconds is not None]
        if not timed:
            return None
        return Seconds(
            sum(row.plain_seconds or 0 for row in timed) + self.rest.plain_seconds,
            sum(row.seconds or 0 for row in timed) + self.rest.seconds,
        )

    def reason_shares(self) -> dict[str, tuple[float | None, float | None]]:
        """(share of the FLOPs, share of the planned time) of products left alone, by reason, largest first.

        None where no FLOPs are known, or no times predicted.
        """
        flops, seconds = sum(row.flops or 0 for row in self.rows), sum(row.seconds or 0 for row in self.rows)
        found: dict[str, tuple[float, float]] = {}
        for row in self.rows:
            if row.reason is not None:
                known = found.get(row.reason, (0, 0))
                found[row.reason] = (known[0] + (row.flops or 0), known[1] + (row.seconds or 0))
        ordered = sorted(found.items(), key=lambda item: (-item[1][1], -item[1][0]))
        return {
            reason: (count / flops if flops else None, took / seconds if seconds else None)
            for reason, (count, took) in ordered
        }

    def _lines(self, all: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The header and the lines of the table, without the optional columns that are empty everywhere."""
        shown = [Group((row,)) for row in self.rows] if all else groups(self.rows)
        cells = [_cells(group) for group in shown]
        dropped = {name for name in _OPTIONAL if not any(line[_HEADER.index(name)] for line in cells)}
        kept = [place for place, name in enumerate(_HEADER) if name not in dropped]
        return tuple(_HEADER[place] for place in kept), [tuple(line[place] for place in kept) for line in cells]

    def _notes(self) -> list[str]:
        """The lines below the table."""
        lines = (
            *self._reason_lines(), self.summary(), *self._uncompiled_lines(), *self._note_lines(),
            *self._predicted_lines(), *_advice_lines(self.host_bound(), self.graphs), *self._passes_line(),
        )  # fmt: skip
        return [one_line(line) for line in lines]

    def _uncompiled_lines(self) -> list[str]:
        """A line for each of Dynamo's limits that was reached, with the functions that it leaves uncompiled."""
        functions: dict[str, list[str]] = {}
        for function, limit in self.uncompiled.items():
            functions.setdefault(limit, []).append(function)
        return [
            "runs uncompiled for further inputs (where sizes differ compile with dynamic=True, or raise "
            f"torch._dynamo.config.{limit}): {', '.join(names)}"
            for limit, names in functions.items()
        ]

    def _limit_line(self) -> str:
        """The cause where Dynamo's limits kept every function from being compiled; "" where they did not."""
        limits = ", ".join(f"torch._dynamo.config.{limit}" for limit in dict.fromkeys(self.uncompiled.values()))
        return limits and f"Dynamo's limit of recompilations ({limits}) leaves {', '.join(self.uncompiled)} {_CURE}."

    def _note_lines(self) -> list[str]:
        """A line for each note, with the layers that have it."""
        layers: dict[str, dict[str, None]] = {}
        for row in self.rows:
            if row.note is not None:
                layers.setdefault(row.note, {})[shown_name(row)] = None
        return [f"{note}: {', '.join(names)}" for note, names in layers.items()]

    def _reason_lines(self) -> list[str]:
        """A line with the shares of each reason; none without predicted times, as the summary has the FLOPs."""
        if self.gpu is None:
            return []
        return [
            f"left alone, {_share(flops)} of the FLOPs, {_share(seconds)} of the predicted time: {reason}"
            for reason, (flops, seconds) in self.reason_shares().items()
        ]

    def _predicted_lines(self) -> list[str]:
        """The sum of the predicted times, and the layers that are predicted to lose."""
        if self.gpu is None:
            return []
        timed = [row for row in self.rows if row.seconds is not None]
        if not timed:
            return [f"predicted on {self.gpu}: no product of a kind and size that the model is for"]
        plain, planned = self.predicted() or (0.0, 0.0)
        line = (f"predicted on {self.gpu}, not measured: {_time(plain)} us in bf16, {_time(planned)} us as planned, "
                f"{plain / planned:.2f} times as fast; outside of matrix products {_time(self.rest.plain_seconds)} and "
                f"{_time(self.rest.seconds)} us of these")  # fmt: skip
        if len(timed) < len(self.rows):
            line += f"; {len(self.rows) - len(timed)} products not predicted"
        losing = [f"{name} ({value:.2f})" for name, value in self.losing().items()]
        advice = f"predicted to lose, better skipped by a rule: {', '.join(losing)}"
        return [line, *([advice] if losing else [])]

    def _passes_line(self) -> list[str]:
        """A line with the matches of each pass, and its time where it is known."""
        told = (f"{name} {run.matches}" + f" ({1e3 * run.seconds:.1f} ms)" * (run.seconds > 0)
                for name, run in self.passes.items())  # fmt: skip
        return [f"passes: {', '.join(told)}"] if self.passes else []


def _advice_lines(graphs: Sequence[GraphLaunches], graph_count: int | None) -> list[str]:
    """A line that advises CUDA graphs where the host issues launches more slowly than the GPU runs them; or none.

    graphs: the launches of the graphs in which the host binds. graph_count: how many graphs were compiled.
    """
    if not graphs:
        return []
    total = sum(graphs, GraphLaunches())
    where = f" of {len(graphs)} of {graph_count} graphs" if (graph_count or 1) > 1 else ""
    return [
        'predicted to wait for the host, better compiled with torch.compile(..., mode="reduce-overhead"): '
        f"{total.count} launches{where} take the host {1e6 * total.host_seconds:.1f} us to issue, and the GPU "
        f"{1e6 * total.seconds:.1f} us to run; CUDA graphs issue them at once"
    ]


def _cells(group: Group) -> tuple[str, ...]:
    row = group.first
    saved = None if row.saved is None else f"{_size(row.saved)} of {_size(row.saved_plain or 0)}"
    plain, planned, gained = group.plain_seconds, group.seconds, group.gain
    values = (
        group.name, row.product, row.m, row.n, row.k, row.left, row.right, row.tier, row.weight_scales, row.fused,
        saved,
        None if plain is None else _time(plain), None if planned is None else _time(planned),
        None if gained is None else f"{gained:.2f}", row.launches, row.reason,
    )  # fmt: skip
    return tuple("" if value is None else one_line(str(value)) for value in values)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def _share(part: float | None) -> str:
    return "?" if part is None else f"{part:.1%}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
