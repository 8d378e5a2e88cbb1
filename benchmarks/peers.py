"""Kernels of other projects, called on Hopper as vLLM calls them, for the benchmarks that measure beside them.

All are in the wheel vllm==0.20.0, which is built for torch 2.11 and CUDA 13; DeepGEMM compiles with nvcc. `folder` is
where the wheel was unzipped:

    pip download --no-deps vllm==0.20.0
    unzip vllm-*.whl vllm/_C.abi3.so vllm/scalar_type.py 'vllm/third_party/*' -d FOLDER
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VERSION = "vllm 0.20.0"
Call = Callable[[torch.Tensor], torch.Tensor]
Codes = tuple[torch.Tensor, torch.Tensor]  # and their scales


@functools.cache
def _vllm(folder: Path) -> tuple[Any, Any]:
    """(vLLM's ops, its numbers of element types)."""
    torch.ops.load_library(folder / "vllm/_C.abi3.so")
    _import_from(folder / "vllm")
    from scalar_type import scalar_types

    return torch.ops._C, scalar_types


def marlin(folder: Path, codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> Call:
    """Marlin's product of bf16 activations with NVFP4 weights: `quantize`'s codes [n, k / 2] and scales [n, k / 16]."""
    ops, types = _vllm(folder)
    n, k = len(codes), 2 * codes.shape[1]
    packed = ops.gptq_marlin_repack(codes.view(torch.int32).T.contiguous(), codes.new_empty(0, dtype=torch.int32),
                                    k, n, 4, False)  # fmt: skip
    # Marlin's threads read scales in this order. Its scales are bytes of five and three bits, without a sign: the upper
    # halves of float16 numbers, 2^7 times the scale, moved up by a bit.
    order = torch.arange(64, device=codes.device).view(8, 8).T.flatten()
    rows = scales.T.half().reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(k // 16, n) * 2**7
    scales = (rows.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()
    factor = (global_scale * 2.0**119).reshape(1)  # for bf16's exponents in the place of E2M1's, less the 2^7
    locks = torch.zeros(torch.cuda.get_device_properties(codes.device).multi_processor_count, dtype=torch.int32,
                        device=codes.device)  # fmt: skip
    kind = types.float4_e2m1f.id
    return lambda x: ops.marlin_gemm(x, None, packed, None, scales, None, factor, None, None, None, locks, kind,
                                     len(x), n, k, True, False, True, False)  # fmt: skip


def machete(folder: Path, n: int, k: int) -> Call:
    """Machete's product of bf16 activations with random INT4 weights [n, k] in groups of 128."""
    ops, types = _vllm(folder)
    kind, dtype = types.uint4b8.id, torch.bfloat16
    codes = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), device="cuda", dtype=torch.int32)
    weight = ops.machete_prepack_B(codes.T, dtype, kind, dtype)
    scales = torch.rand(k // 128, n, device="cuda", dtype=dtype)
    return lambda x: ops.machete_mm(x, weight, kind, None, scales, None, 128, None, None, None)


def deep_gemm(folder: Path, a: Codes, b: Codes) -> torch.Tensor:
    """DeepGEMM's product of FP8 codes with float32 scales of blocks, 1x128 of `a` and 128x128 of `b`."""
    _import_from(folder / "vllm/third_party")
    import deep_gemm

    out = a[0].new_empty((len(a[0]), len(b[0])), dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(a, b, out)
    return out


def _import_from(path: Path) -> None:
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))


def check(peer: str, result: torch.Tensor, ours: torch.Tensor) -> None:
    """Raise RuntimeError if the result of a peer that reads the same numbers is not this package's within 1 %."""
    error = (result.float() - ours.float()).norm() / ours.float().norm()
    if not error < 0.01:
        raise RuntimeError(f"{peer}'s result differs from fp4compile's by {error:.3f} of its norm")


def gpt_oss_experts(folder: Path, router: torch.nn.Module, experts: int, hidden: int, top: int) -> Call:
    """triton_kernels' MLP of gpt-oss: `top` experts a token, chosen by `router`, with random MXFP4 codes."""
    _import_from(folder / "vllm/third_party")
    import triton_kernels.matmul_ogs_details.opt_flags as opt_flags
    from triton_kernels.matmul_ogs import (
        FlexCtx,
        FnSpecs,
        FusedActivation,
        GatherIndx,
        PrecisionConfig,
        RoutingData,
        ScatterIndx,
        matmul_ogs,
    )
    from triton_kernels.numerics import InFlexData
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, make_ragged_tensor_metadata, wrap_torch_tensor
    from triton_kernels.tensor_details import layout
    from triton_kernels.topk import topk

    opt_flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
    of_codes, codes_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    of_scales, scales_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

    def weights(n: int) -> tuple:
        codes = torch.randint(0, 256, (experts, n, hidden // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(118, 125, (experts, n, hidden // 32), device="cuda", dtype=torch.uint8)
        codes = convert_layout(wrap_torch_tensor(codes.mT, dtype=FP4), of_codes, **codes_options)
        scales = convert_layout(wrap_torch_tensor(scales.mT), of_scales, **scales_options)
        config = PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
        return codes, torch.zeros(experts, n, device="cuda"), config

    (up, up_bias, up_config), (down, down_bias, down_config) = weights(2 * hidden), weights(hidden)
    gate = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0))

    def run(x: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, router.weight, router.bias)
        chosen = topk(logits, top, apply_softmax=True)
        into, out_of = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        groups = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, into.shape[0])
        factors = chosen.vals.flatten()[out_of]
        routing = RoutingData(factors, groups.block_sizes, experts, top, groups)
        inner = matmul_ogs(x, up, up_bias, routing, gather_indx=GatherIndx(out_of, into), precision_config=up_config,
                           fused_activation=gate)  # fmt: skip
        return matmul_ogs(inner, down, down_bias, routing, scatter_indx=ScatterIndx(into, out_of),
                          precision_config=down_config, gammas=factors)  # fmt: skip

    return run
