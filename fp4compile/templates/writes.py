"""What a kernel writes, said beside the kernel: torch need not compile the kernel to find it out."""

from collections.abc import Callable, Mapping
from typing import Any

Condition = Callable[[Mapping[str, Any]], bool]


def writes(*always: str, **where: Condition) -> Callable[[Any], Any]:
    """A decorator of a Triton kernel that says which tensors the kernel writes, as its attribute `written`.

    always: names of arguments. where: conditions of further arguments, functions of the kernel's arguments by name,
    constexpr ones among them. An argument that a launch does not use must not be among them: the launch passes another
    tensor in its place, which torch would take for written. Tests compare each declaration with what torch finds.
    """

    def declared(kernel: Any) -> Any:
        kernel.written = lambda arguments: {*always, *(name for name, holds in where.items() if holds(arguments))}
        return kernel

    return declared


def of_several() -> dict[str, Condition]:
    """The conditions of `out_1_ptr` and `out_2_ptr`: the launch has a second matmul, or a third one."""
    return {f"out_{i}_ptr": (lambda arguments, i=i: arguments["GROUP_SIZE"] > i) for i in (1, 2)}


def of_stored() -> dict[str, Condition]:
    """The conditions of `stored_1_ptr` to `stored_3_ptr`, for stored results of a prologue: the launch has a tensor."""
    return {name: (lambda arguments, name=name: arguments.get(name) is not None)
            for name in (f"stored_{i}_ptr" for i in (1, 2, 3))}  # fmt: skip


def of(constant: str) -> Condition:
    """The condition that a constexpr argument is neither False nor 0."""
    return lambda arguments: bool(arguments[constant])


def of_scales(data: str = "data_ptr", where: Condition = lambda arguments: True) -> Condition:
    """The condition of block scales: the format has some, and `data` gets codes and not dequantised values.

    where: a further condition, without which `data` may be None.
    """
    return lambda arguments: (
        where(arguments) and arguments["SCALE"] != "none" and not arguments[data].dtype.is_floating_point
    )


def of_outer(arguments: Mapping[str, Any]) -> bool:
    """The condition of global and row scales: the kernel makes them of amaxes."""
    return arguments["OUTER"].endswith(("amax", "find"))
