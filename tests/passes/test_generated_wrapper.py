"""The wrapper that Inductor generates for a GPU that is not there, whole but for compiling its kernels.

In a process of its own: torch remembers what it once found out about the GPU.
"""

import os
import re
from contextlib import nullcontext

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from fp4compile import _inductor_patches
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.fuse_epilogue import fuse_epilogue
from fp4compile.passes.fuse_horizontal import fuse_horizontal
from fp4compile.passes.fuse_prologue import fuse_prologue
from fp4compile.passes.inplace import inplace
from fp4compile.passes.lower import lower
from tests.helpers import in_interpreter
from tests.helpers.absent_gpu import ANY, fused_graph, pretend

PRETENDING = os.environ.get("FP4COMPILE_PRETENDING") == "1"
pretending = pytest.mark.skipif(not PRETENDING, reason="run in a process of its own")


def wrapper_of(graph_module, mode):
    """The text for a post-grad graph on fake CUDA tensors, with epilogues and lowered."""
    inputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    graph_module.recompile()
    ours = fake_quantize, fuse_epilogue, fuse_prologue, fuse_horizontal, inplace, lower
    passes = {"post_grad_custom_post_pass": lambda graph: [one(graph) for one in ours]}
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), config.patch(compile_threads=1, **passes):
        post_grad_passes(graph_module, is_inference=True)
        graph_module.recompile()
        lowering = GraphLowering(graph_module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
        with V.set_graph_handler(lowering), mode:
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return getattr(code, "value", code)


def generated(function, *shapes, **options):
    """(definitions of kernels, calls): the two halves of a function's wrapper."""
    found = fused_graph(function, *shapes, paper=nullcontext, fuse=False, **options)
    return wrapper_of(torch.fx.GraphModule({}, found.graph), found.mode).split("def call(")


LIBRARY = re.compile(r"extern_kernels\._scaled_mm\(|torch\.ops\.fp4compile\.scaled_mm_opaque\.default\(")


def mlp(x, w, v, w_down):
    return x + F.linear(F.silu(F.linear(x, w)) * F.linear(x, v), w_down)


def mlp_wrapper(monkeypatch, sm, recipe, rows):
    """`kernels_and_calls` of the MLP."""
    pretend(monkeypatch, sm)
    shapes = ((rows, 512), (1056, 512), (1056, 512), (512, 1056))
    return kernels_and_calls(*generated(mlp, *shapes, recipe=recipe))


def kernels_and_calls(definitions, calls):
    """Of a wrapper: the kernels by name, and the lines of the calls."""
    kernels = dict(
        re.findall(r"^(\w+) = async_compile.triton\((.*?)^\'\'\', device_str", definitions, re.DOTALL | re.M)
    )
    return kernels, [line.strip() for line in calls.splitlines() if ".run(" in line or LIBRARY.search(line)]


# Of the down product and of the gate.
EPILOGUES = ["add 1 0", "silu.narrow 0; mul 2 1"]


def epilogues_in(kernels):
    """Of each kernel with an epilogue: its name, and the steps."""
    found = {name: re.search(r"'EPILOGUE': '[^'|]+ \| ([^'|]+) \|", text) for name, text in kernels.items()}
    return {name: match[1] for name, match in found.items() if match}


@pretending
@pytest.mark.parametrize(("recipe", "rows"), [("nvfp4", 300), ("nvfp4_weight_only", 40)])
def test_generated_wrapper(recipe, rows, monkeypatch):
    """Whole, without a GPU: the gate takes the other product, the residual the input, and Inductor computes nothing."""
    kernels, calls = mlp_wrapper(monkeypatch, 90, recipe, rows)
    epilogues = epilogues_in(kernels)
    assert sorted(epilogues.values()) == EPILOGUES  # the sum, and silu times the other
    gate, residual = (next(name for name in epilogues if epilogues[name] == value) for value in EPILOGUES[::-1])
    # Nor does it fill anything but what maxima of large tensors are added up in.
    assert not [name for name in kernels if name.startswith("triton_") and "zeros" not in name]
    assert calls[-1].startswith(f"{residual}.run(") and "x_1" in calls[-1]
    assert sum(call.startswith(f"{gate}.run(") for call in calls) == 1


def norm_and_product(x, y, scale, w):
    x = x + y
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * scale
    return x + F.linear(normed, w)


NORM_AND_PRODUCT = (300, 512), (300, 512), (512,), (512, 512)


@pretending
def test_generated_wrapper_of_a_prologue(monkeypatch):
    """The quantiser computes the end of the norm: Inductor's kernel writes the sum and the statistics alone."""
    pretend(monkeypatch, 90)
    definitions, calls = generated(norm_and_product, *NORM_AND_PRODUCT, recipe="nvfp4")
    assert len(re.findall(r"'PROLOGUE': 'aux0 col1 row2 \| ", definitions)) == 2
    (sums,) = re.findall(r"^ *triton_per\w+\.run\((.*)\)", calls, re.M)
    quantisers = re.findall(r"^ *(\w+_amax\w*|quantize_rows\w*)\.run\((.*)\)", calls, re.M)
    statistics, x, y, both, *_ = sums.split(", ")
    assert (x, y) == ("x_1", "y_1") and "scale_1" not in sums
    reading = [arguments for _, arguments in quantisers if f"{statistics}, scale_1, -1, -1" in arguments]
    assert len(reading) == 2 and all(both in arguments for arguments in reading)
    # The residual is read from where the sums stand, not added again.
    assert sum("y_1" in line for line in calls.splitlines() if ".run(" in line) == 1


@pretending
def test_generated_wrapper_of_a_norm(monkeypatch):
    """One kernel reads both terms once, and writes codes, scales and the sum, of any number of rows."""
    pretend(monkeypatch, 90)
    shapes = ((ANY, 512), (ANY, 512), (512,), (512, 512))
    _, calls = generated(norm_and_product, *shapes, recipe="mxfp8")
    launches = re.findall(r"^ *(\w+)\.run\((.*), stream=", calls, re.M)
    assert [name for name, _ in launches] == ["quantize_whole_rows_0", "quantize_rows_1", "triton_poi_fused_0"]
    (_, norm), _, (_, residual) = launches
    assert "x_1" in norm and "y_1, scale_1, -1, -1, -1" in norm
    (stored,) = re.findall(r"-1, -1, -1, (buf\d+), -1, -1", norm)
    assert stored in residual


def halves_of_a_product(x, w, w_down):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w_down)


@pretending
def test_generated_wrapper_of_slices(monkeypatch):
    """The quantiser reads both halves of the product where they lie: nobody copies them."""
    pretend(monkeypatch, 90)
    shapes = (2, ANY, 512), (2 * 1032, 512), (512, 1032)
    _, calls = generated(halves_of_a_product, *shapes, recipe="mxfp8")
    assert not re.search(r"triton_poi(?!\w*new_zeros)|copy_|clone", calls)
    reading = re.findall(r"quantize_rows_\d+\.run\((.*), stream=", calls)
    half = r"reinterpret_tensor\((buf\d+), \(.*?, 1032\), \(.*?2064, 1\), (\d+)\)"
    (halves,) = (found for found in (re.findall(half, arguments) for arguments in reading) if found)
    assert [start for _, start in halves] == ["0", "1032"] and len({buffer for buffer, _ in halves}) == 1


@pretending
def test_generated_wrapper_of_slices_of_experts(monkeypatch):
    """The same of the product of all experts; nor does anybody copy the offsets."""

    def experts(x, w, v, offs):
        gate, up = F.grouped_mm(x, w.transpose(1, 2), offs=offs).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, v.transpose(1, 2), offs=offs)

    pretend(monkeypatch, 100)
    shapes, dtypes = ((ANY, 512), (4, 1024, 512), (4, 256, 512), (4,)), (*[torch.bfloat16] * 3, torch.int32)
    _, calls = generated(experts, *shapes, recipe="mxfp8", dtypes=dtypes)
    assert not re.search(r"triton_poi(?!\w*new_zeros)|copy_|clone", calls)
    _, last = [one for one in re.findall(r"quantize_rows_\d+\.run\((.*), stream=", calls) if "offs_1" in one]
    halves = re.findall(r"reinterpret_tensor\((buf\d+), \([^()]*512\), \([^()]*1024, 1\), (\d+)\)", last)
    assert [start for _, start in halves] == ["0", "512"] and len({buffer for buffer, _ in halves}) == 1


@pretending
def test_what_starts_early(monkeypatch):
    """The kernels that wait for the amax and for the swizzled A, and no others, are launched as dependents."""
    kernels, calls = mlp_wrapper(monkeypatch, 90, "nvfp4", 16)
    early = [name for name, text in kernels.items() if "'launch_pdl': True" in text]
    assert {re.sub(r"_\d+$", "", name) for name in early} == {"quantize_rows", "gemm_wgmma_sm90"}
    assert all("'PDL': True" in kernels[name] for name in early)
    assert len(early) == sum("'PDL': True" in text for text in kernels.values())
    products = [index for index, call in enumerate(calls) if call.startswith("gemm_wgmma_sm90")]
    assert len(products) == 2 and all(calls[index - 1].startswith("swizzle_a_sm90") for index in products)


@pretending
@pytest.mark.parametrize(("sm", "recipe", "rows"), [
    pytest.param(100, "nvfp4", ANY, id="100-nvfp4-any"),
    pytest.param(103, "float8_rowwise", ANY, id="103-float8_rowwise-any"),
])  # fmt: skip
def test_large_products_are_the_librarys(sm, recipe, rows, monkeypatch):
    """It reads what the quantise kernels wrote, where they wrote it; Inductor does the rest in two passes or one.

    Nothing is copied, and no memory is filled but for a maximum or a scale of 1.
    """
    pretend(monkeypatch, sm)
    shapes = (rows, 4096), (4096, 4096), (4096, 4096), (4096, 4096)
    _, text = generated(mlp, *shapes, recipe=recipe, sm=sm)
    assert not re.search(r"copy_\(|clone|gemm_", text)
    passes = re.findall(r"^ *(triton_\w+)\.run\(", text, re.M)
    # The gate is the quantiser's prologue, whose first kernel stores it for the second; or Inductor rescales it.
    ours = 2 if recipe == "float8_rowwise" else 1
    assert len([name for name in passes if not re.search("zeros|ones", name)]) == ours
    written: set[str] = set()
    products = 0
    for line in text.splitlines():
        product = LIBRARY.search(line)
        if product is not None:
            products += 1
            codes_and_scales = re.findall(r"aten\.view\.dtype\(\D*(buf\d+)|default\((buf\d+)", line)
            assert {name for pair in codes_and_scales for name in pair if name} <= written
        elif re.match(r" *quantize_", line):
            written |= {*re.findall(r"buf\d+", line)}
    assert products == 3


@pretending
def test_few_rows_on_sm100(monkeypatch):
    """Each product is block-scaled and cut along K; its sums are added by a kernel that starts early and ends it."""
    kernels, calls = mlp_wrapper(monkeypatch, 100, "nvfp4_rowwise", 64)
    products = [index for index, call in enumerate(calls) if call.startswith("gemm_")]
    assert len(products) == 3 and all(calls[i].startswith("gemm_skinny_block_scaled_sm100") for i in products)
    assert all(calls[i + 1].startswith("split_k_reduction") for i in products)
    assert len({calls[i].split(".")[0] for i in products[:2]}) == 1, "sums in parts have no epilogue"
    assert sorted(epilogues_in(kernels).values()) == EPILOGUES
    reductions = {name: text for name, text in kernels.items() if name.startswith("split_k_reduction")}
    assert set(epilogues_in(kernels)) < set(reductions)
    assert all("'launch_pdl': True" in text for text in reductions.values())
    assert all("'LAUNCH_DEPENDENTS': 1" in text for name, text in kernels.items() if name.startswith("gemm_"))


@pretending
def test_few_rows_of_a_group_on_sm100(monkeypatch):
    """Q, K and V are one launch, then one for the sums of each, whose memory nobody else touches."""
    pretend(monkeypatch, 100)
    shapes = (64, 1, 512), (256, 512), (128, 512), (128, 512), (512, 256)
    _, text = generated(attention, *shapes, recipe="nvfp4")
    launches = re.findall(r"^ *(gemm_skinny_block_scaled_sm100|split_k_reduction)_\d+\.run\((.*)\)", text, re.M)
    assert [name for name, _ in launches][:4] == ["gemm_skinny_block_scaled_sm100", *["split_k_reduction"] * 3]
    sums = re.findall(r"(buf\d+) = empty_strided_cuda\(\(\d+, 1, \d+, (\d+)\), .*torch.float32\)", text)[:3]
    assert sorted(int(size) for _, size in sums) == [128, 128, 256]
    assert all(f" {name}," in launches[0][1] for name, _ in sums)
    assert {reduction.split(",")[0] for _, reduction in launches[1:4]} == {name for name, _ in sums}
    assert not re.search(r"copy_|zeros|clone", text)


@pretending
@pytest.mark.parametrize("recipe", ["float8_rowwise", "nvfp4"])
def test_a_gradient_over_the_product(recipe, monkeypatch):
    """Two gradients of what one product leaves behind: one kernel, which reads the product and writes over it."""

    def gradients(dy, w, gate, up):
        d = dy @ w
        s = torch.sigmoid(gate)
        return (d * F.silu(gate)) @ w.t(), (d * up * s * (1 + gate * (1 - s))) @ w.t()

    pretend(monkeypatch, 90)
    shapes = (300, 512), (512, 1088), (300, 1088), (300, 1088)
    _, text = generated(gradients, *shapes, recipe=recipe)
    (call,) = re.findall(r"triton_poi\w+\.run\((.*gate_1.*)\)", text)
    assert max(map(call.split(", ").count, call.split(", "))) == 2
    sizes = ("(300, 1088), (1088, 1)", "(1, 300, 1088), (326400, 1088, 1)")
    assert sum(text.count(f"empty_strided_cuda({size}, torch.bfloat16)") for size in sizes) == 2


def attention(x, wq, wk, wv, wo):
    """As in Llama, what follows one product stands before the next one; keys and values serve two heads each."""
    q = F.linear(x, wq).view(x.shape[0], -1, 4, 64).transpose(1, 2)
    k, v = (F.linear(x, w).view(x.shape[0], -1, 2, 64).transpose(1, 2) for w in (wk, wv))
    k, v = (kv.repeat_interleave(2, 1) for kv in (k * k.cos(), v))
    return x + F.linear(F.scaled_dot_product_attention(q * q.cos(), k, v).transpose(1, 2).flatten(2), wo)


@pretending
@pytest.mark.parametrize(("recipe", "kernel", "function", "shapes", "sizes"), [
    ("nvfp4_weight_only", "gemm_skinny", attention, ((8, 1, 256), (256, 256), (128, 256), (128, 256), (256, 256)),
     (256, 128, 128)),
    ("nvfp4", "gemv", mlp, ((1, 512), (1088, 512), (1088, 512), (512, 1088)), (1088, 1088)),
], ids=["attention", "mlp"])  # fmt: skip
def test_horizontal_fusion_is_one_launch(recipe, kernel, function, shapes, sizes, monkeypatch):
    """Q, K and V; gate and up. Each has memory of its own, that nobody copies or fills, and is read from there."""
    pretend(monkeypatch, 90)
    _, text = generated(function, *shapes, recipe=recipe)
    launches = re.findall(r"^ *(gem\w+?|dequant_operand)_\d+\.run\((.*)\)", text, re.M)
    assert [name for name, _ in launches] == [kernel] * 2
    together = launches[0][1]
    before, after = text.split(f"({together})")
    outs = [(name, int(size)) for name, size in re.findall(
        rf"(buf\d+) = empty_strided_cuda\(\(1, {shapes[0][0]}, (\d+)\), .*torch.bfloat16\)", before
    )]  # fmt: skip
    written = [(name, size) for name, size in outs if f" {name}," in together]
    assert sorted(size for _, size in written) == sorted(sizes)
    assert all(re.search(rf"run\(.*\b{name}\b", after) for name, _ in written)
    assert not re.search(r"copy_|zeros|clone", text)


def two_layers(x, y, w, v):
    return F.linear(x, w), F.linear(y, v)


@pretending
@pytest.mark.parametrize(("columns", "products"), [(2048, 1), (2056, 2)])
def test_launches_of_other_sizes_share_kernels(columns, products, monkeypatch):
    """Each kernel is defined once for both layers. A size of 2056, which is no multiple of 16, needs another one."""
    pretend(monkeypatch, 90)
    shapes = (512, 512), (512, 1024), (1024, 512), (columns, 1024)
    kernels, calls = kernels_and_calls(*generated(two_layers, *shapes, recipe="nvfp4"))
    texts = [text.replace(name, "") for name, text in kernels.items()]
    assert len(set(texts)) == len(texts) < len(calls)
    assert sum(name.startswith("gemm_wgmma_sm90") for name in kernels) == products


@pretending
def test_numbers_that_triton_compiles_the_same_code_for():
    def kind(number):
        return native_specialize_impl(CUDABackend, number, False, True, True)

    numbers = [-16, -1, *range(40), 4096, *(2**31 + i for i in range(-17, 40)), 2**40 + 1, 2**62]
    found = {number: _inductor_patches._of_same_kind(number) for number in numbers}
    assert all(kind(number) == kind(one) for number, one in found.items())
    assert {one for number, one in found.items() if number > 1} == {2, 16, 2**31 + 2, 2**31 + 16}
    assert all(_inductor_patches._of_same_kind(one) is one for one in (True, None, "e2m1", sympy.Symbol("s0")))


@pretending
def test_launches_are_decomposed_without_a_trace(monkeypatch):
    """The wrapper is the one of Inductor's own decomposition, which traces every launch."""
    pretend(monkeypatch, 90)
    traced = []
    dense = triton_kernel_wrap.triton_kernel_wrapper_functional_dense
    monkeypatch.setattr(
        triton_kernel_wrap,
        "triton_kernel_wrapper_functional_dense",
        lambda **kwargs: traced.append(kwargs) or dense(**kwargs),
    )
    direct = kernels_and_calls(*generated(norm_and_product, *NORM_AND_PRODUCT, recipe="nvfp4"))
    assert direct[0] and not traced
    monkeypatch.setattr(_inductor_patches, "decompose_launches_directly", lambda: None)
    decompose = post_grad.decompose_triton_kernel_wrapper_functional
    monkeypatch.setattr(post_grad, "decompose_triton_kernel_wrapper_functional", decompose.__wrapped__)
    by_tracing = kernels_and_calls(*generated(norm_and_product, *NORM_AND_PRODUCT, recipe="nvfp4"))
    assert traced and direct == by_tracing


@pytest.mark.skipif(PRETENDING, reason="is that process")
def test_in_a_process_of_its_own():
    in_interpreter.assert_passes(__file__, "test_predicted_kernels.py", variable="FP4COMPILE_PRETENDING")
