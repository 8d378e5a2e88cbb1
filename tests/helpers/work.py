"""A limit on how much work is done, by a measure that no other load of the machine changes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Raise AssertionError as soon as this thread has called more functions, of Python and of C, in a `with` block."""
    count, before = 0, sys.getprofile()

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if count > calls:
            sys.setprofile(None)
            raise AssertionError(f"more than {calls} calls of functions")

    sys.setprofile(count_call)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert count <= calls, "the error was caught"
