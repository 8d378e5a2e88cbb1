"""Inductor without the C++ compiler: graphs are compiled as ever, but the loops that it writes compute nothing.

For tests of graphs, of what is kept, and of reports: their tensors have the right shapes, and no values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def compute_nothing() -> Iterator[None]:
    """Let no loop that is compiled in here compute anything."""
    from torch._inductor.async_compile import AsyncCompile  # not before tests/conftest.py has set the environment
    from torch._inductor.codecache import PyCodeCache

    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda self, types, source: lambda *args: None):
        yield
    PyCodeCache.cache_clear()  # what was generated in here, others compile
