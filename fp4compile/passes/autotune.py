"""Under `mode="max-autotune"`, let time decide who computes a product.

Entry: `fastest(product)`, for a `scaled_mm` node that is about to be lowered. Where the library and the Triton kernel
of the block-scaled matrix units could both compute all of it, both do, on tensors like the product's own, and the
faster one is taken; equal products are timed once in a process. Without that mode the library is taken, untimed.
"""

import logging
from collections.abc import Callable

import torch
from torch._inductor import config
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from fp4compile.passes.graph import arguments_of

log = logging.getLogger("fp4compile")
_winners: dict[tuple, str] = {}


def fastest(product: Node) -> str:
    """Which of `templates.scaled_mm.contenders` computes a product soonest; the default where nothing can be timed."""
    from fp4compile.templates.gemm import dispatch as scaled_mm  # here, so that the CPU needs no Triton

    if not (config.max_autotune or config.max_autotune_gemm):
        return "library"
    arguments = arguments_of(product)
    names = scaled_mm.contenders(*arguments) if all(map(_static, arguments)) else ()
    if not names or not torch.cuda.is_available():
        return "library"
    key = tuple(map(_signature, arguments))
    if key not in _winners:
        times = {name: _time(_call(arguments, name)) for name in names}
        _winners[key] = min(times, key=times.get)
        log.info("product %s: %s", [tuple(arguments[i].shape) for i in (0, 4)], times)
    return _winners[key]


def _static(value) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _signature(value) -> tuple:
    if not isinstance(value, torch.Tensor):
        return (value,)
    return value.device, value.dtype, tuple(value.shape), tuple(value.stride())


def _call(arguments: list, contender: str) -> Callable[[], torch.Tensor]:
    """A call of the product by one contender, on real tensors."""
    from fp4compile.templates.gemm import dispatch as scaled_mm

    with unset_fake_temporarily():
        tensors = [_like(value) if isinstance(value, torch.Tensor) else value for value in arguments]

    def call():
        with unset_fake_temporarily(), torch.no_grad(), scaled_mm.preferring(contender):
            return scaled_mm.scaled_mm(*tensors)

    return call


def _like(value: torch.Tensor) -> torch.Tensor:
    """A tensor of that size and kind: any codes, scales of 1, or random numbers."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) and value.dim() == 1:  # swizzled scales
        made.view(torch.uint8).fill_(0x38 if value.dtype == torch.float8_e4m3fn else 127)
    elif value.dtype.itemsize == 1:
        made.view(torch.uint8).random_(0, 127)  # no NaN of any format
    else:
        made.normal_()
    return made


def _time(call: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of a call; infinite of one that this machine cannot make."""
    import triton

    try:
        return triton.testing.do_bench(call, return_mode="median")
    except RuntimeError as error:
        log.info("not timed: %s", error)
        return float("inf")
