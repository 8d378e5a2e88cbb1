"""What a kernel writes, said beside the kernel: torch need not compile the kernel to find it out."""

from collections.abc import Callable, Mapping
from typing import Any


def writes(*always: str, **where: Callable[[Mapping[str, Any]], bool]) -> Callable[[Any], Any]:
    """A decorator of a Triton kernel that says which tensors the kernel writes, as its attribute `written`.

    always: names of arguments. where: conditions of further arguments, functions of the kernel's constexpr arguments by
    name. An argument that a launch does not use must not be among them: the launch passes another tensor in its place,
    which torch would take for written. Tests compare each declaration with what torch finds.
    """

    def declared(kernel: Any) -> Any:
        kernel.written = lambda constants: {*always, *(name for name, holds in where.items() if holds(constants))}
        return kernel

    return declared


def of_several() -> dict[str, Callable[[Mapping[str, Any]], bool]]:
    """The conditions of the results of the second and the third matmul of a launch: that it has as many."""
    return {f"out_{i}_ptr": (lambda constants, i=i: constants["GROUP_SIZE"] > i) for i in (1, 2)}
