"""The report: one `Row` for each matmul, quantised or with the reason why not, collected in a `Report`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from torch._guards import TraceId

from fp4compile.recipe.rules import Rule, unmatched
from fp4compile.report import page
from fp4compile.report.product_row import CATEGORIES, Row, is_below, one_line, shown_name, sizeless
from fp4compile.report.report_view import size, view_of
from fp4compile.report.row_classes import by_layer, gain, layer_name
from fp4compile.report.text import to_text

__all__ = ["CATEGORIES", "PassRun", "Report", "Row", "is_below"]


class Seconds(NamedTuple):
    """Predicted seconds of a graph's launches that no matmul needs, unquantised and as planned."""

    plain_seconds: float
    seconds: float


@dataclass(frozen=True)
class GraphLaunches:
    """The launches of a graph, forward and backward together, without CUDA graphs.

    count: the number of launches. seconds, host_seconds: predicted seconds of the GPU to run them, and of the host to
    issue them.
    """

    count: int
    seconds: float
    host_seconds: float


class PassRun(NamedTuple):
    """A pass's matches and seconds on one graph, or summed over several graphs."""

    matches: int
    seconds: float


_NO_GRAPH = (
    "what runs is not what is captured (a wrapper calls the original model, or `.module` or `._orig_mod` of the "
    "compiled one); compilation is switched off (TORCH_COMPILE_DISABLE, torch.compiler.disable); Dynamo left out the "
    "function for a call that it does not capture, such as of nn.LSTM or a scripted module, or for a graph break in a "
    "loop (TORCH_LOGS=graph_breaks); "
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
    "it is called inside of a transform of torch.func, such as grad (compile the transformed function instead); "
    "its first call was inside of a TorchDispatchMode, such as FlopCounterMode; "
    "the module is a part of a model that another backend compiles; "
    f"another backend reached Dynamo's limit of recompilations, and the code is left {_CURE}; "
    "or the model was never called."
)


@dataclass
class Frame:
    """A function that Dynamo compiles, maybe several times.

    number: of the current compilation. rows: how often each row occurs in the current compilation, and how often it
    does in any size. earlier: the largest such counts of the earlier compilations.
    """

    number: tuple[int, ...] | None = None
    rows: Counter = field(default_factory=Counter)
    earlier: Counter = field(default_factory=Counter)

    def enter(self, number: tuple[int, ...]) -> None:
        """Begin a compilation if the number is new. One compilation may make several graphs under one number."""
        if self.number is not None and number != self.number:
            self.earlier, self.rows = self.earlier | self.rows, Counter()
        self.number = number

    def new(self, row: Row) -> Row | None:
        """Count a row, and return it; None where an earlier compilation has it as often as the current one so far.

        A row that earlier compilations have in other sizes is marked as `again`.
        """
        of_any_size = ("any size", sizeless(row))
        for key in (row, of_any_size):
            self.rows[key] += 1
        if self.rows[row] <= self.earlier[row]:
            return None
        return replace(row, again=self.rows[of_any_size] <= self.earlier[of_any_size])


@dataclass(repr=False)
class Report:
    """The rows of every graph that a backend compiled (or `explain` captured), in the order of compilation.

    `print(report)` shows a summary and the `table` of the rows, with equal layers on one line. A notebook shows the
    same as HTML.

    recipe: the name of the recipe.
    rows: one for each matmul. Where a function was compiled again for other sizes, its matmuls have a row for each of
        these sizes; all but the first are marked as `again`, and all figures count the first alone.
    counts: how often each pass matched, by the pass's name, summed over the graphs. `counts` and `seconds` lack passes
        that are switched off.
    graphs: how many graphs were compiled; None where the rows do not come from graphs (`fp4compile.pack_`).
    lost: how many of these graphs came from Inductor's cache when their rows no longer existed.
    seconds: how long each pass took in this process, summed over the graphs. A graph from Inductor's cache adds none.
    gpu: the name of the GPU for which the rows' times are predicted; None where no times are predicted.
    rest: the predicted times of all other operations in these graphs, such as norms, activations and embeddings.
    uncompiled: for each function that Dynamo no longer compiles for new inputs, the limit in `torch._dynamo.config`
        that was reached.
    rules: the recipe's rules, where the report is a backend's or of `explain`; see `unmatched_rules`.
    packed_before: how many weights of the model were packed already when `fp4compile.pack_` was called.
    launches: the launches of each graph with matmuls on the GPU `gpu`; see `host_bound`.
    outside: where the report is of `explain`, the layers that also ran outside of the captured graphs.
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
    outside: list[str] = field(default_factory=list)
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
        launches: the graph's launches; None where they are unknown, or issued as a CUDA graph.
        """
        added = rows if trace is None else self._unseen(rows, trace)
        self.rows.extend(added)
        if rest is not None and (not rows or not all(row.again for row in added)):
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
        return [new for row in rows if (new := frame.new(row)) is not None]

    def complete(self, rows: list[Row], fused: Mapping[str, str]) -> None:
        """Set `fused` in the report's rows, by node name, after a backward graph was compiled late."""
        changed = {(row, row.node): text for row in rows if (text := fused.get(row.node or "")) is not None}
        self.rows = [
            replace(row, fused=changed[row, row.node]) if (row, row.node) in changed else row for row in self.rows
        ]

    def forget_compilations(self) -> None:
        """Forget which functions were compiled: after `torch.compiler.reset()`, Dynamo numbers functions anew."""
        self._frames.clear()
        self.uncompiled.clear()

    @property
    def matmuls(self) -> list[Row]:
        """The rows, each matmul in one size only."""
        return [row for row in self.rows if not row.again]

    @property
    def quantised(self) -> list[Row]:
        """The rows of the matmuls that are quantised, each in one size only."""
        return [row for row in self.matmuls if row.quantised]

    def reasons(self) -> dict[str, int]:
        """The number of matmuls that are not quantised for each reason."""
        return dict(Counter(row.reason for row in self.matmuls if row.reason is not None))

    def unmatched_rules(self) -> tuple[Rule, ...]:
        """The rules that decided about no matmul of all graphs so far.

        Empty while that is undecided: before the first graph, and where rows of a graph are missing or functions run
        uncompiled.
        """
        if not self.graphs or self.lost or self.uncompiled:
            return ()
        return unmatched(self.rules, (row.module if row.name is None else row.name for row in self.rows))

    def flops_share(self, category: str | None = None) -> float | None:
        """The quantised share (0 to 1) of the known FLOPs; None where no FLOPs are known.

        category: one of CATEGORIES, to count its matmuls only.
        """
        rows = [row for row in self.matmuls if category in (None, row.category)]
        total = sum(row.flops or 0 for row in rows)
        return sum(row.flops or 0 for row in rows if row.quantised) / total if total else None

    def flops_shares(self) -> dict[str, float]:
        """The `flops_share` of each category that has FLOPs."""
        shares = {category: self.flops_share(category) for category in CATEGORIES}
        return {category: share for category, share in shares.items() if share is not None}

    def saved(self) -> tuple[int, int]:
        """(bytes of packed activations saved for the backward pass, bytes of these activations unquantised)."""
        return sum(row.saved or 0 for row in self.matmuls), sum(row.saved_plain or 0 for row in self.matmuls)

    def weights(self) -> tuple[int, int]:
        """(bytes of the quantised weights as `pack_` packs them, and unquantised), each weight once."""
        found = {(shown_name(row), row.weight, row.weight_plain) for row in self.quantised if row.weight is not None}
        return sum(packed or 0 for _, packed, _ in found), sum(plain or 0 for *_, plain in found)

    def summary(self) -> str:
        """One line: how many matmuls are quantised, their share of the FLOPs, and the share of each category."""
        recipe = one_line(self.recipe)
        if self.graphs == 0:
            return f"recipe {recipe}: compiled nothing. {self.nothing_compiled()}"
        share, shares = self.flops_share(), self.flops_shares()
        line = f"recipe {recipe}: {len(self.quantised)} of {len(self.matmuls)} matmuls quantised"
        if share is not None:
            line += f", {share:.1%} of their FLOPs"
        if len(shares) > 1:
            line += f" ({', '.join(f'{category} {part:.1%}' for category, part in shares.items())})"
        memory = {"saved for backward": self.saved(), "weights": self.weights() if self.graphs is None else (0, 0)}
        memory_parts = [f"{what}: {size(packed)} packed, unquantised {size(plain)}"
                        for what, (packed, plain) in memory.items() if packed]  # fmt: skip
        return "; ".join((line, *map(one_line, self.caveats()), *memory_parts))

    def nothing_compiled(self) -> str:
        """The likely causes where no graph was compiled."""
        return self._limit_line() or NOTHING_COMPILED

    def caveats(self) -> list[str]:
        """A text for each kind of matmul that the figures do not count, and for rules without effect."""
        found = []
        unknown = sum(row.flops is None for row in self.matmuls)
        if unknown and self.graphs is not None:  # rows that do not come from graphs never have FLOPs
            found.append(f"the FLOPs of {unknown} of the matmuls are unknown and not counted")
        if self.uncompiled:
            found.append("what runs uncompiled is not counted")
        if self.outside:
            named = ", ".join([*self.outside[:5], *(["..."] if self.outside[5:] else [])])
            found.append(f"{len(self.outside)} layers run outside of the captured graphs, and are not counted: {named}")
        if self.lost:
            found.append(f"rows of {self.lost} graphs from Inductor's cache are gone, and these not counted")
        if self.packed_before:
            found.append(f"{self.packed_before} packed already, and not counted")
        if idle := self.unmatched_rules():
            found.append(f"rules that decided about no matmul: {', '.join(repr(rule.pattern) for rule in idle)}")
        return found

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
            "weights": self.weights()[0],
            "weights_plain": self.weights()[1],
            "gpu": self.gpu,
            "uncompiled": dict(self.uncompiled),
            "unmatched_rules": [rule.pattern for rule in self.unmatched_rules()],
            "packed_before": self.packed_before,
            "outside": list(self.outside),
            "gains": self.gains(),
            "losing": self.losing(),
            "host_bound": [
                {"launches": graph.count, "host_seconds": graph.host_seconds, "seconds": graph.seconds}
                for graph in self.host_bound()
            ],
            "rest": None if self.gpu is None else self.rest._asdict(),
        }

    def __repr__(self) -> str:
        quantised = f"{len(self.quantised)} of {len(self.matmuls)} matmuls quantised"
        return f"<Report: recipe {one_line(self.recipe)}, {quantised}; print it for the table>"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page.fragment(view_of(self))

    def table(self, *, all: bool = False) -> str:
        """The summary and the rows as text. Layers whose names differ only in numbers are one line, largest first.

        At most 120 columns wide. Unprintable characters of names are escaped.

        all: one line for each row instead, in the order of compilation, with its launches.
        """
        return to_text(view_of(self, all))

    def to_csv(self) -> str:
        """All rows as CSV, with the names of the fields of `Row` in the first line.

        Text that a spreadsheet would read as a formula begins with an apostrophe.
        """
        return page.to_csv(self.rows)

    def to_html(self, *, all: bool = False) -> str:
        """The content of `table` as one self-contained HTML page, with bars where times are predicted."""
        return page.to_html(view_of(self, all))

    def gains(self) -> dict[str, float]:
        """The predicted speed-up over the unquantised layer of each quantised layer, all its matmuls together.

        Equal layers are one entry, as in the table. Layers without a prediction are left out.
        """
        return self._gains(lambda row: row)

    def losing(self) -> dict[str, float]:
        """The predicted speed-up of each layer that would be faster unquantised while the others stay quantised.

        A launch that another layer needs too runs anyway, so it is not counted here.
        """

        def alone(row: Row) -> Row:
            return replace(row, seconds=None if row.seconds is None else row.seconds - (row.shared_seconds or 0))

        return {name: value for name, value in self._gains(alone).items() if value < 1}

    def _gains(self, counted: Callable[[Row], Row]) -> dict[str, float]:
        """The speed-up of each quantised layer with a prediction. counted: gives a row the times that count."""
        layers = [rows for rows in by_layer(self.matmuls) if any(row.quantised for row in rows)]
        found = {layer_name(rows): gain(map(counted, rows)) for rows in layers}
        return {name: value for name, value in found.items() if value is not None}

    def host_bound(self) -> list[GraphLaunches]:
        """The launches of each graph that, by prediction, take the host longer to issue than the GPU to run.

        CUDA graphs (`torch.compile(..., mode="reduce-overhead")`) issue them at once. Empty where graphs use these, and
        in reports without predicted times.
        """
        return [graph for graph in self.launches if graph.host_seconds > graph.seconds]

    def predicted(self) -> Seconds | None:
        """The predicted seconds of all graphs, unquantised and as planned: the sum of the rows and of `rest`.

        None without predictions.
        """
        timed = [row for row in self.matmuls if row.seconds is not None]
        if not timed:
            return None
        return Seconds(
            sum(row.plain_seconds or 0 for row in timed) + self.rest.plain_seconds,
            sum(row.seconds or 0 for row in timed) + self.rest.seconds,
        )

    def reason_shares(self) -> dict[str, tuple[float | None, float | None]]:
        """(share of the FLOPs, share of the planned time) of matmuls that are not quantised, by reason, largest first.

        None where no FLOPs are known, or no times predicted.
        """
        rows = self.matmuls
        flops, seconds = sum(row.flops or 0 for row in rows), sum(row.seconds or 0 for row in rows)
        found: dict[str, tuple[float, float]] = {}
        for row in rows:
            if row.reason is not None:
                known = found.get(row.reason, (0, 0))
                found[row.reason] = (known[0] + (row.flops or 0), known[1] + (row.seconds or 0))
        ordered = sorted(found.items(), key=lambda item: (-item[1][1], -item[1][0]))
        return {
            reason: (count / flops if flops else None, took / seconds if seconds else None)
            for reason, (count, took) in ordered
        }

    def _limit_line(self) -> str:
        """The cause where Dynamo's limits kept every function from being compiled; "" where they did not."""
        limits = ", ".join(f"torch._dynamo.config.{limit}" for limit in dict.fromkeys(self.uncompiled.values()))
        return limits and f"Dynamo's limit of recompilations ({limits}) leaves {', '.join(self.uncompiled)} {_CURE}."
