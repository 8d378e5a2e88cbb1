"""Functions of tensors that run at every gather of FSDP2, compiled where the tensors lie on a GPU.

FSDP2 issues the gather of a block's weights right before the block, and an idle GPU waits for the host. Called op by
op, the quantisers of a block take the host several times as long as FSDP2's own work for a gather. Inductor's wrapper
launches the same kernels with less work between them.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.passes.manager import LowerPasses

Function = Callable[..., list[torch.Tensor]]
_compiled: dict[Hashable, Callable] = {}


def run(function: Function, fixed: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`function(fixed, *tensors)`; on a GPU, compiled at the first call with this argument and tensors of these shapes.

    function: depends only on its arguments, and may write to the tensors. fixed: hashable.
    """
    if tensors[0].device.type != "cuda":
        return function(fixed, *tensors)
    key = (function, fixed, *((each.shape, each.stride(), each.dtype, each.device) for each in tensors))
    if key not in _compiled:
        _compiled[key] = compiled(partial(function, fixed), tensors)
    return _compiled[key](*tensors)


def compiled(function: Function, tensors: list[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """`function` compiled by Inductor for tensors of these shapes, with this package's kernels in its wrapper."""
    graph = make_fx(function, tracing_mode="fake")(*tensors)
    settings = {"post_grad_custom_post_pass": LowerPasses(lambda *told: None), "triton.cudagraphs": False}
    return compile_fx(graph, tensors, compile_fx_inner, config_patches=settings)
