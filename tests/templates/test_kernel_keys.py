"""Triton's cache on disk finds every change of a kernel."""

import importlib
import pkgutil
from types import CodeType, ModuleType

import triton.language as tl
from triton.runtime.jit import ConstexprFunction

import fp4compile.templates
from fp4compile import _compat

COVERED = (ModuleType, ConstexprFunction, tl.constexpr, type)


def read(code: CodeType) -> set[str]:
    """The names that a function, and the functions in it, read beside its own."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(read, inner))


def test_functions_of_kernels_read_no_globals_that_are_no_part_of_the_key():
    """The key of a kernel has the source of a `constexpr_function`, and of its globals only those of these types."""
    found = []
    for info in pkgutil.walk_packages(fp4compile.templates.__path__, "fp4compile.templates."):
        if info.name.endswith(".two_cta_kernel_sm100") and not _compat.two_cta_products():
            continue  # Gluon of an old Triton lacks what it imports
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, ConstexprFunction) and value.fn.__module__ == info.name:
                there = value.fn.__globals__
                found += [(info.name, name, each) for each in read(value.fn.__code__) & there.keys()
                          if not isinstance(there[each], COVERED)]  # fmt: skip
    assert found == []
