"""What the tests of GEMM kernels share: where they run, their operands, launches and code for GPUs that are absent."""

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Operand
from tests.helpers import choices

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETING else "cuda"
OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
on_kernels = [] if INTERPRETING else [pytest.mark.gpu, no_gpu]
kernels_only = pytest.mark.skipif(not INTERPRETING and not torch.cuda.is_available(), reason="run in the interpreter")
for_gpus = pytest.mark.skipif(INTERPRETING, reason="sizes for a GPU")


def gpu(function):
    for mark in on_kernels:
        function = mark(function)
    return kernels_only(function)


def quantized(x, fmt, layout="linear"):
    """x as an operand, quantised by the reference; plain where fmt is a dtype."""
    if isinstance(fmt, torch.dtype):
        return Operand(x.to(fmt))
    return Operand(*reference.quantize(x, fmt, None, layout if fmt.block else "linear"), fmt)


def on_device(value):
    """An operand, a tensor or None, where the kernels run."""
    if isinstance(value, Operand):
        return Operand(*map(on_device, (value.data, value.scales, value.outer)), value.format)
    return None if value is None else value.to(DEVICE)


def assert_same_bits(got, expected, rows=None):
    """Assert equal bits, and contiguous tensors; of floats NaNs are equal whatever their payload.

    rows: which rows are compared of what has a row for each.
    """
    for one, other in zip(got, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype) and one.is_contiguous()
        one, other = one.cpu(), other.cpu()
        if rows is not None and one.dim() == 2 and len(one) == len(rows):
            one, other = one[rows], other[rows]
        if one.dtype.itemsize > 1:
            one, other = (x.masked_fill(x.isnan(), torch.pi) for x in (one, other))
        assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (one, other)))


def launches(sm, a, b, m, epilogue=None, auxiliaries=(), n=8192):
    """The launches of one product of m x n x 4096, on a GPU that need not be there."""
    import fp4compile.ops.matmul  # noqa: F401
    from fp4compile.hardware import Target
    from fp4compile.templates.launch import dry_run
    from tests.helpers.multiplied import scaled_mm

    def operand(format, rows):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
        if isinstance(format, torch.dtype):
            return Operand(x.to(format))
        fmt = formats.get(format)
        data, scales, outer = torch.ops.fp4compile.quantize(x, fmt.name, -1, layout="swizzled")
        return Operand(data, scales, outer if fmt.outer else None, fmt)

    with dry_run(Target(sm)) as found:
        scaled_mm(operand(a, m), operand(b, n), None, torch.bfloat16, epilogue, auxiliaries)
    return found


def compile_ahead(sm, a, b, m, n=8192):
    """The kernel of a product, compiled."""
    from fp4compile import _compat

    product = next(one for one in launches(sm, a, b, m, n=n) if one.kernel.__name__.startswith("gem"))
    return _compat.compile_ahead(
        product.kernel, product.args, product.constants, product.num_warps, sm, product.num_stages
    )


def written_alone(kernel, folder):
    """The module that Inductor's text of a kernel makes, from a file in a folder."""
    path = folder / "written.py"
    text = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    path.write_text(TritonKernel.gen_common_triton_imports() + "\n@triton.jit\n" + text)
    spec = importlib.util.spec_from_file_location("written", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spilled_bytes(cubin):
    """Bytes of stack and local memory a thread, as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.findall(r"(?:STACK|LOCAL):(\d+)", report.stdout + report.stderr)
    assert usage, "cuobjdump reported nothing"
    return sum(map(int, usage))


def by_library(monkeypatch):
    """Let the library multiply, also beside the interpreter, and return a shape to multiply."""
    if not INTERPRETING:
        return 777, 512, 272
    choices.only(monkeypatch, "dequant_operand")
    monkeypatch.setattr(torch, "mm", _mm)
    return 16, 193, 64


def _mm(a, b, *, out_dtype=None):
    """torch.mm with an out_dtype, which the CPU's has not."""
    return (a.double() @ b.double()).to(out_dtype or a.dtype)


# ptxas of Triton 3.6 (CUDA 12.8) knows neither sm_103 nor all conversions of sm_120.
NEW_PTXAS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
