"""A library matmul of 16-bit numbers with float32 sums and a float32 result, whatever a user allows other matmuls."""

import torch


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] in float32. Both are bf16 or float16 on a CUDA device.

    Their products are exact in float32, and only sums are rounded. PyTorch refuses float16 operands with a float32
    result while `torch.backends.cuda.matmul.allow_fp16_accumulation` is set, and autocast would cast float16 to bf16.
    """
    settings = torch.backends.cuda.matmul
    in_float16 = settings.allow_fp16_accumulation
    settings.allow_fp16_accumulation = False
    try:
        with torch.autocast("cuda", enabled=False):
            return torch.mm(a, b, out_dtype=torch.float32)
    finally:
        settings.allow_fp16_accumulation = in_float16
