"""Triton's cache on disk finds every change of a kernel, and Inductor's copy of a kernel means the same."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from types import CodeType, ModuleType

import triton.language as tl
from triton.runtime.jit import ConstexprFunction, JITFunction

import fp4compile.templates
from fp4compile import _compat

COVERED = (ModuleType, ConstexprFunction, tl.constexpr, type)


def read(code: CodeType) -> set[str]:
    """The names that a function, and the functions in it, read beside its own."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(read, inner))


def modules() -> Iterator[ModuleType]:
    """The modules of kernels that this Triton can import."""
    for info in pkgutil.walk_packages(fp4compile.templates.__path__, "fp4compile.templates."):
        if not info.name.endswith(".two_cta_kernel_sm100") or _compat.two_cta_products():
            yield importlib.import_module(info.name)  # else Gluon of an old Triton lacks what it imports


def meanings(kernel: JITFunction) -> dict[str, set]:
    """What each global name means in a kernel and in the functions that it calls: a function, or a constant's value."""
    found: dict[str, set] = {}
    seen, following = set(), [kernel]
    while following:
        function = following.pop()
        if function in seen:
            continue
        seen.add(function)
        there = function.fn.__globals__
        for name in {node.id for node in ast.walk(ast.parse(function.src)) if isinstance(node, ast.Name)}:
            value = there.get(name)
            if isinstance(value, tl.constexpr):
                found.setdefault(name, set()).add(repr(value.value))
            elif isinstance(value, JITFunction | ConstexprFunction):
                found.setdefault(name, set()).update((value, value.fn.__name__))
                following += [value] if isinstance(value, JITFunction) else []
    return found


def test_a_name_has_one_meaning_in_a_kernel():
    """Inductor writes a kernel's functions and constants into one file, each under the name that it has there."""
    kernels = [each for module in modules() for each in vars(module).values()
               if isinstance(each, JITFunction) and each.fn.__module__ == module.__name__]  # fmt: skip
    assert len(kernels) > 250
    for kernel in kernels:
        for name, found in meanings(kernel).items():
            functions = {each for each in found if not isinstance(each, str)}
            assert len(found - functions) == 1 and len(functions) < 2, (kernel.fn.__name__, name)
            assert not functions or name in found, f"{kernel.fn.__name__} calls a function by an alias, {name}"


def test_functions_of_kernels_read_no_globals_that_are_no_part_of_the_key():
    """The key of a kernel has the source of a `constexpr_function`, and of its globals only those of these types."""
    found = []
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, ConstexprFunction) and value.fn.__module__ == module.__name__:
                there = value.fn.__globals__
                found += [(module.__name__, name, each) for each in read(value.fn.__code__) & there.keys()
                          if not isinstance(there[each], COVERED)]  # fmt: skip
    assert found == []
