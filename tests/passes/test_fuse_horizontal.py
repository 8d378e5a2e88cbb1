"""Products of the same activations in one launch: which ones, in what order, and with what bits."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.check.machine_code import compile_launch
from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.product_spec import text_of
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_RESULTS
from fp4compile.passes.fuse_horizontal import fuse_horizontal
from fp4compile.passes.lower import lower
from fp4compile.templates.gemm import streaming
from fp4compile.templates.gemm.skinny import SkinnyConfig
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import multiply_together
from tests.helpers.choices import configured
from tests.helpers.kernels import OLD_TRITON
from tests.helpers.products import (
    BF16,
    F32,
    K,
    made_late,
    merged,
    on_the_cpu,
    packed,
    product,
    quantised,
    quantised_each,
    traced,
    users_between,
)


def views_of_one(x, q, k, v):
    """Each product has its own view of the activations."""
    return [product(x.view(1, 1, K).view(-1, K), w) for w in (q, k, v)]


def biased(x, q, k, v):
    return [product(x, w, x.new_ones(w[0].shape[0])) for w in (q, k, v)]


def other_activations(x, q, k, v):
    return product(x, q), product(x + 1, k), product(x.half(), v)


def some_biased(x, q, k, v):
    return product(x, q, x.new_ones(q[0].shape[0])), product(x, k)


def biased_differently(x, q, k, v):
    return product(x, q, x.new_ones(q[0].shape[0])), product(x, k, x.new_ones(k[0].shape[0], dtype=F32))


def without_outer(x, q, k, v):
    return product(x, q), product(x, (*k[:2], None, k[3])), product(x, (*v[:2], x.new_ones(24, 1, dtype=F32), v[3]))


def activations_scaled_differently(x, q, k, v):
    data, scales, outer = torch.ops.fp4compile.quantize(x, "nvfp4")
    return [product(data, w, a=(scales, own, "nvfp4")) for w, own in ((q, outer), (k, outer * 2), (v, None))]


def rounded_differently(x, q, k, v):
    return product(x, q), product(x, k, out_dtype=F32)


def bias_of_a_product(x, q, k, v):
    return product(x, k, product(x, v).view(-1))


def scaled_by_a_product(x, q, k, v):
    return product(x, (*q[:2], product(x, k).float().amax().exp(), q[3])), product(x, v)


def crossed(x, q, k, v):
    """Each pair could be one launch, but not both."""
    y = x.exp()
    first = product(x, q)
    other = product(y, (*k[:2], first.float().amax().exp(), k[3]))
    third = product(y, v)
    return other, product(x, (*v[:2], third.float().amax().exp(), v[3]))


def changed_between(x, q, k, v):
    scale = torch.ones_like(k[2])
    first = product(x, (*q[:2], scale, q[3]))
    scale.add_(1)
    return first, product(x, (*k[:2], scale, k[3]))


def drawn_between(x, q, k, v):
    return product(x, q), torch.rand_like(x), product(x, k)


def five(x, q, k, v):
    return [product(x, w) for w in (q, k, v, k, q)]


MERGED = {
    users_between: [3], views_of_one: [3], quantised: [3], quantised_each: [3], biased: [3], made_late: [3],
    five: [3, 2], crossed: [2], scaled_by_a_product: [2], other_activations: [], some_biased: [],
    biased_differently: [], without_outer: [],
    activations_scaled_differently: [], rounded_differently: [], bias_of_a_product: [], changed_between: [],
    drawn_between: [],
}  # fmt: skip


@pytest.mark.parametrize("function", MERGED, ids=lambda function: function.__name__)
def test_which_ones(function):
    """By the reference the graph computes the bits that it did before."""
    weights = [packed(n) for n in (64, 24, 24)]
    graph_module = traced(function, weights)
    x = torch.randn(1, K).bfloat16()
    expected = on_the_cpu(graph_module, x, weights)
    assert merged(graph_module) == MERGED[function]
    assert len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.fp4compile.quantize.default)) <= 1
    got = on_the_cpu(graph_module, x, weights)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("formats", "layouts", "expected"), [
    (("nvfp4", "nvfp4_16x16", "nvfp4_16x16"), ("linear",) * 3, [2]),
    (("nvfp4",) * 3, ("linear", "swizzled", "linear"), [2]), (("mxfp8",) * 3, ("linear",) * 3, [])])  # fmt: skip
def test_same_kind_of_weights(formats, layouts, expected):
    if formats[0] == "mxfp8":
        weights = [(*packed(32, name)[:2], torch.ones(()), name) for name in formats]
    else:
        weights = [packed(32, name, layout) for name, layout in zip(formats, layouts, strict=True)]
    assert merged(traced(users_between, weights)) == expected


@pytest.mark.parametrize(("rows", "sm", "function", "expected"), [
    (8, 90, users_between, [3]), (9, 90, users_between, []), (None, 90, users_between, []),
    (8, 100, users_between, [3]), (8, 90, quantised, [3])])  # fmt: skip
def test_few_rows(rows, sm, function, expected):
    """As many as the streaming kernel serves, and no number that is unknown."""
    assert merged(traced(function, [packed(32)] * 3, rows), sm) == expected


def test_the_cpu_is_left_alone():
    x, (*w, fmt) = torch.randn(1, K).bfloat16(), packed(16)
    graph = make_fx(lambda x, *w: (product(x, (*w, fmt)), product(x, (*w, fmt)) + 1), tracing_mode="fake")(x, *w).graph
    assert fuse_horizontal(graph) == 0


def test_traced_once():
    """One launch for the products of a quantised A, which is dequantised once."""
    graph_module = traced(quantised, [packed(n) for n in (64, 24, 24)], rows=4)
    merged(graph_module)
    (x, *_) = graph_module.graph.find_nodes(op="placeholder")
    with x.meta["val"].fake_mode, dry_run(Target(90)) as launches:
        lower(graph_module.graph)
    graph_module.graph.lint()
    assert [one.kernel.__name__ for one in launches][-2:] == ["dequant_operand", "gemm_skinny"]
    assert (launches[-1].constants["GROUP_SIZE"], launches[-1].constants["EVEN"]) == (3, 0)


# ---------------------------------------------------------------- the op


def arguments(x, weights, out_dtype=BF16, a=(None, None, None)):
    b, b_scales, b_outer, names = map(list, zip(*weights, strict=True))
    outers = b_outer if b_outer[0] is not None else []
    return x, *a[:2], b, b_scales, outers, text_of(a[2], names[0], out_dtype)


def samples():
    """(activations, weights, biases, dtype of the results, the rest of the activations)"""
    x, biases = torch.randn(3, K), [torch.randn(16), torch.randn(5)]
    yield x, [packed(16), packed(5)], biases, BF16, (None, None, None)
    yield x.bfloat16(), [packed(16, "mxfp8", "swizzled")], None, F32, (None, None, None)
    data, scales, outer = torch.ops.fp4compile.quantize(x, "nvfp4_rowwise")
    yield data, [packed(n, "nvfp4_rowwise") for n in (7, 1, 9, 2)], None, BF16, (scales, outer, "nvfp4_rowwise")


@pytest.mark.parametrize("sample", list(samples()), ids=["bias", "one", "row scales"])
def test_op_is_as_many_products(sample):
    x, weights, biases, out_dtype, a = sample
    given, options = arguments(x, weights, out_dtype, a), {"bias": biases}
    got = SCALED_MM_RESULTS(*given, **options)
    for out, w, bias in zip(got, weights, biases or [None] * len(weights), strict=True):
        assert torch.equal(out, product(x, w, bias, out_dtype, a))
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(SCALED_MM_RESULTS, given, options, test_utils=checks)


def test_bad_arguments():
    x, two = torch.randn(3, K), [packed(16), packed(5)]
    given = arguments(x, two)
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad()):
        with mode, pytest.raises(ValueError, match="bias: expected none or one for each of 2 products, got 1"):
            SCALED_MM_RESULTS(*given, bias=[torch.randn(16)])
    *rest, outers, spec = given
    with pytest.raises(ValueError, match="b_outer: expected none or one"):
        SCALED_MM_RESULTS(*rest, outers[:1], spec)
    with pytest.raises(ValueError, match="unknown format"):
        SCALED_MM_RESULTS(*rest, outers, "plain @ fp3 -> bfloat16")
    with pytest.raises(ValueError, match="b: products with an epilogue are computed one at a time, got 2 of"):
        SCALED_MM_RESULTS(*rest, outers, f"{spec} | relu product | to bfloat16")
    with pytest.raises(ValueError, match="contraction dimensions"):
        SCALED_MM_RESULTS(x[:, :64], *given[1:])
    meta = [packed(n, k=K)[:3] for n in (16, 24)]
    on_meta = [tuple(t.to("meta") for t in w) for w in meta]
    a = Operand(x.to("meta").bfloat16())
    with dry_run(Target(90)), pytest.raises(ValueError, match="bias: expected"):
        multiply_together([Arguments.of(a, Operand(*on_meta[0], formats.get("nvfp4")), torch.empty(3))])
    with dry_run(Target(90)), pytest.raises(TypeError, match="b: data of format mxfp8"):
        multiply_together([Arguments.of(a, Operand(*w, formats.get("mxfp8"))) for w in on_meta])


# ---------------------------------------------------------------- the kernel


def launches(sm, sizes, m, k=4096, a=None, bias=False, outer="nvfp4"):
    """The launches of products of m x sizes x k, on a GPU that need not be there."""
    fmt = formats.get(outer)

    def quantized(rows):
        data, scales, factor = torch.ops.fp4compile.quantize(
            torch.empty(rows, k, dtype=BF16, device="meta"), fmt.name, layout="swizzled"
        )
        return Operand(data, scales, factor if fmt.outer else None, fmt)

    x = Operand(torch.empty(m, k, dtype=BF16, device="meta")) if a is None else quantized(m)
    biases = [torch.empty(n, dtype=BF16, device="meta") if bias else None for n in sizes]
    with dry_run(Target(sm)) as found:
        multiply_together([Arguments.of(x, quantized(n), b) for n, b in zip(sizes, biases, strict=True)])
    return found


QKV, GATE_UP = (4096, 1024, 1024), (14336, 14336)


def test_one_configuration_for_all():
    """That of a product as large as all together; the expansion of A comes first."""
    (one,) = launches(90, QKV, 1)
    assert (one.kernel.__name__, one.constants["EVEN"], one.grid) == ("gemv", 1, 384)
    assert [one.args[name] for name in ("m", "n", "n_1", "n_2", "k_vectors")] == [1, *QKV, 128]
    (one,) = launches(90, QKV, 5)
    assert (one.kernel.__name__, one.constants["TILES"], one.constants["EVEN"]) == ("gemm_skinny", 1, 1)
    assert [one.args[name] for name in ("m", "n", "n_1", "n_2", "k_vectors")] == [5, *QKV, 128]
    (one,) = launches(90, (1024, 1000), 2)
    assert (one.grid, one.constants["EVEN"], one.constants["GROUP_SIZE"]) == (127, 0, 2)
    (one,) = launches(90, GATE_UP, 8)
    assert (one.constants["TILES"], one.constants["CHAINS"]) == (2, 1)
    found = launches(90, QKV, 8, a="nvfp4")
    assert [one.kernel.__name__ for one in found] == ["dequant_operand", "gemm_skinny"]
    for sizes, m in (((64,) * 4, 1), ((64,), 1), ((64, 64), 9)):  # too many, too few, too many rows
        assert all(one.constants.get("GROUP_SIZE", 1) == 1 for one in launches(90, sizes, m))


@pytest.mark.parametrize(("sm", "sizes", "m", "options"), [
    (90, QKV, 1, {}), (90, GATE_UP, 8, {}), (90, (777, 8, 1), 2, {"k": 1088, "bias": True, "outer": "nvfp4_rowwise"}),
    (100, QKV, 1, {}), *([] if OLD_TRITON else [(120, GATE_UP, 8, {})]),
])  # fmt: skip
def test_compiles_ahead(sm, sizes, m, options):
    """Nothing spills, and of one row and whole steps registers are for as many programs as shared memory is."""
    (launched,) = launches(sm, sizes, m, **options)
    found = compile_launch(launched, sm).resources
    assert found.spills == 0
    if m == 1 and not options:
        programs = (Target(sm).shared_memory + 1024) // (launched.constants["SHARED"] + 1024)
        assert found.registers <= 65536 // (32 * launched.num_warps * programs) // 8 * 8


# ---------------------------------------------------------------- on a GPU


CASES = [
    ((4096, 1024, 1024), 1, 4096, None, "nvfp4", False, BF16), ((512, 768), 4, 2048, None, "nvfp4", False, BF16),
    ((777, 40, 1), 3, 1088, None, "nvfp4", True, BF16), ((100, 2064), 8, 4096, None, "nvfp4_rowwise", True, F32),
    ((256, 512, 128), 1, 4096, "nvfp4", "nvfp4", False, BF16), ((64, 64, 64), 2, 64, None, "nvfp4_16x16", False, F32),
    ((96, 33), 7, 576, "nvfp4_rowwise", "nvfp4_rowwise", True, torch.float16),
    ((4096, 4096), 1, 4096, None, "nvfp4", False, BF16), ((8000, 200, 41), 1, 1088, "nvfp4", "nvfp4", True, BF16),
    ((8192, 32), 8, 2048, None, "nvfp4", False, BF16), ((777, 8000), 6, 1088, "nvfp4", "nvfp4", True, BF16),
    ((16384, 8), 4, 1088, None, "nvfp4_16x16", True, BF16), ((8192, 33), 1, 8768, None, "nvfp4", True, BF16),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize(("sizes", "m", "k", "a", "b", "bias", "out_dtype"), CASES)
def test_bits_of_the_separate_products(sizes, m, k, a, b, bias, out_dtype, layout, monkeypatch):
    """Of products that are cut among as many warps."""
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    left = (x, None, None, None) if a is None else (*torch.ops.fp4compile.quantize(x, a), a)
    weights = [
        torch.ops.fp4compile.quantize(torch.randn(n, k, device="cuda", dtype=BF16), b, layout=layout) for n in sizes
    ]
    biases = [torch.randn(n, device="cuda") for n in sizes] if bias else []
    each = [(*w, b) for w in weights]
    got = SCALED_MM_RESULTS(*arguments(left[0], each, out_dtype, left[1:]), bias=biases)
    # Each product alone, launched as the group is.
    alone = streaming.CANDIDATE.configure
    configured(monkeypatch, "streaming", lambda problem: alone(dataclasses.replace(problem, n=sum(sizes))))
    for i, w in enumerate(each):
        expected = product(left[0], w, biases[i] if bias else None, out_dtype, left[1:])
        assert (got[i].shape, got[i].dtype) == (expected.shape, expected.dtype)
        assert torch.equal(got[i], expected)


FOUR_WARPS = SkinnyConfig(rows=4, tiles=1, warps=4, stages=3, chains=2, grid=5)


class Block(torch.nn.Module):
    """Attention over the tokens of a batch, grouped as in Llama, and a gated MLP."""

    def __init__(self, bias):
        super().__init__()
        for name, (n, k) in {"q": (512, 512), "k": (256, 512), "v": (256, 512), "o": (512, 512),
                             "gate": (1088, 512), "up": (1088, 512), "down": (512, 1088)}.items():  # fmt: skip
            setattr(self, name, torch.nn.Linear(k, n, bias=bias, dtype=BF16))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 64)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (x * x.float().cos().to(x.dtype) for x in (q, k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "nvfp4"])
def test_compiled(recipe, bias, mode, monkeypatch):
    """Of packed weights: seven products are four launches, and the bits are those of seven."""
    model = Block(bias).cuda()
    fp4compile.pack_(model, recipe)
    x = torch.randn(1, 4, 512, device="cuda", dtype=BF16)
    # With few columns a product has eight warps, together these have four.
    configured(monkeypatch, "streaming", FOUR_WARPS)

    def run():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fp4compile.backend(recipe, strict=True), fullgraph=True, mode=mode)
        with torch.no_grad():
            first, (code,) = run_and_get_code(compiled, x)
            outputs = [first.clone(), *(compiled(x).clone() for _ in range(3))]
        return outputs, re.findall(r"(?<!\w)(gem\w+?)_\d+\.run\(", code)

    got, names = run()
    assert names == ["gemm_skinny"] * 4
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("fuse_horizontal",))
    with config.patch(force_disable_caches=True):
        expected, names = run()
    assert names == ["gemm_skinny"] * 7
    assert all(torch.equal(a, expected[0]) for a in (*got, *expected))
