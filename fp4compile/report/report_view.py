"""The content of a report, which `report.text` and `report.page` render: a summary, a table, and notes.

Entry: `view_of(report, all)`. All its texts are printable and without line breaks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fp4compile.report.product_row import one_line, shown_name
from fp4compile.report.row_classes import Group, gain, groups, layer_name, times

Report = Any  # `report.report.Report`, which imports this file
_SHOWN_REASONS = 3
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Fact:
    """A part of the summary.

    label: its name. figure: the main number. details: lines beside it.
    """

    label: str
    figure: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of the table. numeric: whether its cells are numbers, or empty."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the table. seconds: the predicted seconds unquantised and as planned; None without a prediction."""

    cells: tuple[str, ...]
    seconds: tuple[float, float] | None = None


@dataclass(frozen=True)
class ReportView:
    """A title, the summary, the table, and notes on the table."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()


_COLUMNS = (
    Column("layer"), Column("matmul"), Column("M", True), Column("N", True), Column("K", True), Column("formats"),
    Column("saved", True), Column("before", True), Column("after", True), Column("gain", True),
    Column("how, or why not quantised"),
)  # fmt: skip
_OPTIONAL = ("saved", "before", "after", "gain")


def view_of(report: Report, all: bool = False) -> ReportView:
    """The view of a report. all: a line for each row, in the order of compilation, instead of equal layers together."""
    title = f"fp4compile, recipe {report.recipe}" + (f", predicted on {report.gpu}" if report.gpu else "")
    columns, lines = _table([Group((row,)) for row in report.rows] if all else groups(report.rows), all)
    return ReportView(
        one_line(title), columns, lines,
        tuple(Fact(fact.label, one_line(fact.figure), tuple(map(one_line, fact.details))) for fact in _facts(report)),
        tuple(map(one_line, (*_note_lines(report), *_passes_line(report)))),
    )  # fmt: skip


# ---------------------------------------------------------------- the summary


def _facts(report: Report) -> list[Fact]:
    if report.graphs == 0:
        return [Fact("quantised", "compiled nothing", (report.nothing_compiled(),))]
    found = [_quantised(report), *_not_quantised(report), *_predicted(report), *_memory(report)]
    if warnings := [*report.caveats(), *_uncompiled_lines(report)]:
        found.append(Fact("warnings", "", tuple(warnings)))
    if advice := [*_losing_line(report), *_advice_lines(report)]:
        found.append(Fact("advice", "", tuple(advice)))
    return found


def _quantised(report: Report) -> Fact:
    count = f"{len(report.quantised)} of {len(report.matmuls)} matmuls"
    share, shares = report.flops_share(), report.flops_shares()
    if share is None:
        return Fact("quantised", count)
    parts = f"; {', '.join(f'{category} {part:.1%}' for category, part in shares.items())}" if len(shares) > 1 else ""
    return Fact("quantised", f"{share:.1%} of the FLOPs", (count + parts,))


def _not_quantised(report: Report) -> list[Fact]:
    """The largest reasons, a line each."""
    reasons, counts = report.reason_shares(), report.reasons()
    lines = []
    for reason, (flops, seconds) in list(reasons.items())[:_SHOWN_REASONS]:
        shares = [] if flops is None else [f"{flops:.1%} of FLOPs"]
        shares += [] if seconds is None else [f"{seconds:.1%} of predicted time"]
        lines.append(f"{reason} ({', '.join([*shares, _matmuls(counts[reason])])})")
    if others := list(reasons)[_SHOWN_REASONS:]:
        more = "1 more reason" if len(others) == 1 else f"{len(others)} more reasons"
        last = f"and {more} in the table ({_matmuls(sum(counts[each] for each in others))})"
        lines[-1] += f"; {last}"
    if not lines:
        return []
    share = report.flops_share()
    figure = _matmuls(sum(counts.values())) if share is None else f"{1 - share:.1%} of the FLOPs"
    return [Fact("not quantised", figure, tuple(lines))]


def _matmuls(count: int) -> str:
    return f"{count} matmul{'' if count == 1 else 's'}"


def _predicted(report: Report) -> list[Fact]:
    """The sum of the predicted times."""
    if report.gpu is None:
        return []
    predicted = report.predicted()
    if predicted is None:
        return [Fact("predicted", f"nothing on {report.gpu}", ("no matmul of a kind and size that the model is for",))]
    plain, planned = predicted
    unit = unit_of(predicted)
    after, before, rest_after, rest_before = (
        in_unit(seconds, unit) for seconds in (planned, plain, report.rest.seconds, report.rest.plain_seconds)
    )
    line = (f"{after} {unit} instead of {before} {unit} on {report.gpu}, not measured; outside of matmuls "
            f"{rest_after} instead of {rest_before} {unit}")  # fmt: skip
    if unknown := sum(row.seconds is None for row in report.matmuls):
        line += f"; {_matmuls(unknown)} not predicted"
    return [Fact("predicted", f"{plain / planned:.2f} times as fast", (line,))]


def _memory(report: Report) -> list[Fact]:
    """Bytes of packed weights, and of activations saved for the backward pass."""
    packed, plain = report.saved()
    of = "activations saved for backward"
    if not packed and all(row.product not in ("dgrad", "wgrad") for row in report.rows):
        packed, plain = report.weights()
        of = "weights that are quantised"
        of += "" if report.graphs is None else "; pack_ frees the unquantised ones, compiled graphs keep both"
    return [Fact("memory", f"{size(packed)} instead of {size(plain)}", (of,))] if packed else []


def _uncompiled_lines(report: Report) -> list[str]:
    """A line for each of Dynamo's limits that was reached, with the functions that it leaves uncompiled."""
    functions: dict[str, list[str]] = {}
    for function, limit in report.uncompiled.items():
        functions.setdefault(limit, []).append(function)
    return [
        "runs uncompiled for further inputs (where sizes differ compile with dynamic=True, or raise "
        f"torch._dynamo.config.{limit}): {', '.join(names)}"
        for limit, names in functions.items()
    ]


def _losing_line(report: Report) -> list[str]:
    losing = [f"{name} ({value:.2f})" for name, value in report.losing().items()]
    return [f"predicted to lose, better skipped by a rule: {', '.join(losing)}"] if losing else []


def _advice_lines(report: Report) -> list[str]:
    """A line that advises CUDA graphs where the host issues launches more slowly than the GPU runs them; or none."""
    graphs = report.host_bound()
    if not graphs:
        return []
    count, seconds, host_seconds = (
        sum(getattr(graph, name) for graph in graphs) for name in ("count", "seconds", "host_seconds")
    )
    where = f" of {len(graphs)} of {report.graphs} graphs" if (report.graphs or 1) > 1 else ""
    return [
        'predicted to wait for the host, better compiled with torch.compile(..., mode="reduce-overhead"): '
        f"{count} launches{where} take the host {duration(host_seconds)} to issue, and the GPU "
        f"{duration(seconds)} to run; CUDA graphs issue them at once"
    ]


# ---------------------------------------------------------------- the table


def _table(shown: Sequence[Group], all: bool) -> tuple[tuple[Column, ...], tuple[Line, ...]]:
    """Columns and lines, without the optional columns that are empty everywhere. One unit for all times and bytes."""
    pairs = [times(group.rows) for group in shown]
    time_unit = unit_of(value for pair in pairs for value in pair or ())
    byte_unit = _byte_unit(row.saved_plain for group in shown for row in group.rows)
    cells = [_cells(group, time_unit, byte_unit, all) for group in shown]
    kept = [place for place, column in enumerate(_COLUMNS)
            if column.name not in _OPTIONAL or any(line[place] for line in cells)]  # fmt: skip
    units = {"before": time_unit, "after": time_unit, "saved": byte_unit[1]}
    columns = tuple(
        Column(f"{column.name}, {units[column.name]}" if column.name in units else column.name, column.numeric)
        for column in (_COLUMNS[place] for place in kept)
    )
    lines = tuple(
        Line(tuple(one_line(line[place]) for place in kept), pair) for line, pair in zip(cells, pairs, strict=True)
    )
    return columns, lines


def _cells(group: Group, time_unit: str, byte_unit: tuple[int, str], all: bool) -> tuple[str, ...]:
    row, pair, gained = group.rows[0], times(group.rows), gain(group.rows)
    scale, _ = byte_unit
    saved = "" if row.saved is None else f"{row.saved / scale:.1f} of {(row.saved_plain or 0) / scale:.1f}"
    seconds = ("", "") if pair is None else (in_unit(value, time_unit) for value in pair)
    sizes = (_sizes([getattr(each, name) for each in (*group.rows, *group.again)]) for name in "mnk")
    how = [row.reason or row.tier or "", row.weight_scales and f"weight scales {row.weight_scales}"]
    how += [row.fused and f"fused: {row.fused}", f"launches: {row.launches}" if all and row.launches else None]
    return (
        layer_name(group.rows, len(group.rows)), row.product, *sizes, _formats(row.left, row.right), saved, *seconds,
        "" if gained is None else f"{gained:.2f}", "; ".join(part for part in how if part),
    )  # fmt: skip


def _sizes(values: Sequence[int | str | None]) -> str:
    """A size, or the first and the last of several."""
    found = list(dict.fromkeys(str(value) for value in values if value is not None))
    return ", ".join(found) if len(found) < 3 else f"{found[0]}, ..., {found[-1]}"


def _formats(left: str | None, right: str | None) -> str:
    """The formats of both operands, once where they are equal; "-" for an operand that is not quantised or unknown."""
    names = [None if name is None else _DTYPES.get(name, name) for name in (left, right)]
    if names[0] == names[1]:
        return names[0] or ""
    return " x ".join(name or "-" for name in names)


# ---------------------------------------------------------------- below the table


def _note_lines(report: Report) -> list[str]:
    """A line for each note, with the layers that have it."""
    layers: dict[str, dict[str, None]] = {}
    for row in report.rows:
        if row.note is not None:
            layers.setdefault(row.note, {})[shown_name(row)] = None
    return [f"{note}: {', '.join(names)}" for note, names in layers.items()]


def _passes_line(report: Report) -> list[str]:
    """A line with the matches of each pass, and its time where it is known."""
    told = (f"{name} {run.matches}" + f" ({1e3 * run.seconds:.1f} ms)" * (run.seconds > 0)
            for name, run in report.passes.items())  # fmt: skip
    return [f"passes: {', '.join(told)}"] if report.passes else []


# ---------------------------------------------------------------- units


def unit_of(seconds: Iterable[float | None]) -> str:
    """The unit for several times: milliseconds if the largest has one."""
    return "ms" if max((value or 0 for value in seconds), default=0) >= 1e-3 else "\u00b5s"


def in_unit(seconds: float, unit: str) -> str:
    """A time without its unit."""
    value, digits = (1e3 * seconds, 2) if unit == "ms" else (1e6 * seconds, 1)
    least = 10.0**-digits
    return f"<{least:.{digits}f}" if 0 < value < least / 2 else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """A time with its unit."""
    unit = unit_of([seconds])
    return f"{in_unit(seconds, unit)} {unit}"


def _byte_unit(counts: Iterable[int | None]) -> tuple[int, str]:
    largest = max((count or 0 for count in counts), default=0)
    return next((unit for unit in _UNITS if largest >= unit[0]), _UNITS[-1])


def size(count: int) -> str:
    """A number of bytes with its unit."""
    scale, unit = _byte_unit([count])
    return f"{count / scale:.1f} {unit}"
