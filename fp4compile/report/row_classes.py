"""Groups of a report's rows: equal layers of a deep model together, the largest first.

Only the numbers in the layers' names may differ inside a group: `layers.*.mlp.up_proj x32`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp4compile.report.product_row import PRODUCTS, Row, shown_name, sizeless

_NUMBER = re.compile(r"(?<![^.\[])\d+(?=[.\]]|$)")


@dataclass(frozen=True)
class Group:
    """Rows that differ only in numbers in the layers' names.

    again: the rows of the same matmuls in other sizes.
    """

    rows: tuple[Row, ...]
    again: tuple[Row, ...] = ()


def groups(rows: Sequence[Row]) -> list[Group]:
    """The groups, with the largest layers first, by predicted time unquantised or else by FLOPs."""
    timed = any(row.plain_seconds for row in rows)
    others: dict[Row, list[Row]] = {}  # the rows in other sizes, by `sizeless`
    for row in rows:
        if row.again:
            others.setdefault(sizeless(row), []).append(row)
    found = []
    for members in by_layer(row for row in rows if not row.again):
        size = sum((row.plain_seconds if timed else row.flops) or 0 for row in members)
        equal: dict[Row, list[Row]] = {}
        for row in members:
            equal.setdefault(_anywhere(row), []).append(row)
        parts = [Group(tuple(same), tuple(others.get(sizeless(same[0]), ()))) for same in equal.values()]
        found.append((size, sorted(parts, key=lambda group: PRODUCTS.index(group.rows[0].product))))
    found.sort(key=lambda layer: -layer[0])  # the sort is stable: layers of one size keep their order
    return [group for _, parts in found for group in parts]


def by_layer(rows: Iterable[Row]) -> list[list[Row]]:
    """Lists of the rows of equal layers: layers with equal matmuls and with names that differ only in numbers."""
    layers: dict[str, list[Row]] = {}
    for row in rows:
        layers.setdefault(shown_name(row), []).append(row)
    found: dict[tuple, list[Row]] = {}
    for members in layers.values():
        found.setdefault((_pattern(members[0]), *map(_anywhere, members)), []).extend(members)
    return list(found.values())


def layer_name(rows: Sequence[Row], count: int | None = None) -> str:
    """The name of the rows of equal layers, with `*` for numbers that differ, and `count`: by default, of layers."""
    names = {shown_name(row) for row in rows}
    count = len(names) if count is None else count
    name = names.pop() if len(names) == 1 else _pattern(rows[0])
    return name if count == 1 else f"{name} x{count}"


def times(rows: Iterable[Row]) -> tuple[float, float] | None:
    """The predicted seconds of the rows together, unquantised and as planned; None where a row has no prediction."""
    pairs = [(row.plain_seconds, row.seconds) for row in rows]
    known = [(plain, planned) for plain, planned in pairs if plain is not None and planned is not None]
    return (sum(plain for plain, _ in known), sum(planned for _, planned in known)) if known == pairs else None


def gain(rows: Iterable[Row]) -> float | None:
    """The predicted speed-up of the rows together; None where a row has no prediction."""
    plain, planned = times(rows) or (0.0, 0.0)
    return plain / planned if planned else None


def _anywhere(row: Row) -> Row:
    """The row without its layer's names."""
    return replace(row, module="", name=None)


def _pattern(row: Row) -> str:
    return _NUMBER.sub("*", shown_name(row))
