"""The compilations of a function, as far as a report needs them to tell new rows from rows of an earlier one."""

from collections import Counter
from dataclasses import dataclass, field

from fp4compile.report.product_row import Row


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
