"""Lowering: on a GPU the generated wrapper launches the kernels; elsewhere it calls the ops."""

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code

import fp4compile
from fp4compile.passes.lower import lower

SHAPES = [(32, 64), (7, 80), (1, 96)]


def step(layer, backend, x, **options):
    """(output, input gradient, weight gradient, generated code) of one training step."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, **options)

    def run():
        y = compiled(x)
        y.square().sum().backward()
        return y.detach()

    y, code = run_and_get_code(run)
    return y, x.grad, layer.weight.grad.clone(), "\n".join(code)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp8_32x32", "mxfp4", "float8_rowwise"])
def test_kernels_are_launched_from_the_wrapper(recipe, dynamic):
    for tokens, width in SHAPES:
        layer = torch.nn.Linear(width, 48, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        *on_gpu, code = step(layer, fp4compile.backend(recipe, strict=True), x, dynamic=dynamic)
        assert "fp4compile.quantize.default" not in code
        assert "quantize_rows" in code or "quantize_tiles" in code or "quantize_scaled_rows" in code
        cpu_layer = torch.nn.Linear(width, 48, dtype=torch.bfloat16)
        cpu_layer.load_state_dict(layer.state_dict())
        *on_cpu, _ = step(cpu_layer, fp4compile.backend(recipe, strict=True), x.cpu())
        for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
            # The gradients are quantised after a bf16 output whose last bit may differ.
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=0.1, atol=0.05 * cpu.abs().max().item())
        torch.testing.assert_close(on_gpu[0].cpu(), on_cpu[0], rtol=0.01, atol=1e-3)


@pytest.mark.gpu
def test_weights_changed_between_replays_of_a_cuda_graph():
    layer = torch.nn.Linear(64, 64, device="cuda")
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"), mode="reduce-overhead")
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for factor in (1.0, -2.0, 0.5):
            layer.weight.mul_(factor)
            for _ in range(3):
                y = compiled(x).clone()
            w = fp4compile.quantize(layer.weight, "nvfp4").dequantize()
            xq = fp4compile.quantize(x, "nvfp4").dequantize()
            torch.testing.assert_close(y, xq @ w.t() + layer.bias, rtol=1e-4, atol=1e-4)


def test_the_cpu_keeps_the_ops():
    layer = torch.nn.Linear(64, 48)
    *_, code = step(layer, fp4compile.backend("nvfp4", strict=True), torch.randn(8, 64))
    assert "fp4compile.quantize.default" in code and "fp4compile.scaled_mm.default" in code


def quantizes(x):
    data, scales, outer = torch.ops.fp4compile.quantize(x, "nvfp4")
    values = torch.ops.fp4compile.dequantize(data, scales, outer, "nvfp4", x.shape[-1], torch.bfloat16)
    columns = torch.ops.fp4compile.quantize(x, "mxfp8", 0, layout="swizzled")
    rows = torch.ops.fp4compile.quantize(x, "nvfp4_rowwise")
    return data, scales, outer, values, *columns[:2], *rows, *torch.ops.fp4compile.quantize_both(x, "mxfp4")[:4]


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_every_kernel_gives_the_bits_of_the_op(dynamic):
    counts = []

    def backend(graph_module, inputs):
        patches = {"post_grad_custom_pre_pass": lambda graph: counts.append(lower(graph)), "fx_graph_cache": False}
        return compile_fx(graph_module, inputs, config_patches=patches)

    compiled = torch.compile(quantizes, backend=backend, dynamic=dynamic)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    got, (code,) = run_and_get_code(compiled, x)
    for y, got in [(x, got), *([(x[:37], compiled(x[:37]))] if dynamic else [])]:
        for one, other in zip(got, quantizes(y), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    assert counts == [5]
    for kernel in ("quantize_rows", "tensor_amax", "quantize_scaled_rows", "quantize_tiles", "dequantize_rows"):
        assert f"def {kernel}(" in code
