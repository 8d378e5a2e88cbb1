"""A in the order in which `gemm_wgmma_sm90` reads it: who writes it, and that no bit depends on that."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.hardware import Target
from fp4compile.passes.lib import arranged_operands, traces
from fp4compile.passes.lower import lower
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import times

BF16 = torch.bfloat16
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def product(a, w):
    """a times packed NVFP4 weights."""
    return times((a, None, None, None), (*w, "nvfp4"), out_dtype=a.dtype)


def of_experts(a, w, offs, dtype=BF16):
    """800 tokens times the packed NVFP4 weights of their experts."""
    return times((a, None, None, None), (*w, "nvfp4"), out_dtype=dtype, offs=offs, rows=800)


def applied(then, function, *shapes):
    """(what a pass returns, launched kernels) for the graph of a function of such tensors and of a weight."""
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)) as launches:
        x = [torch.empty(shape, dtype=BF16, device="cuda") for shape in shapes]
        k = shapes[0][-1]
        w = (torch.empty(256, k // 2, dtype=torch.uint8, device="cuda"),
             torch.empty(256, k // 16, dtype=torch.float8_e4m3fn, device="cuda"),
             torch.empty((), device="cuda"))  # fmt: skip
        graph = make_fx(function)(*x, w).graph
        found = then(graph)
        graph.lint()
    return found, [launch.kernel.__name__ for launch in launches]


def launched(function, *shapes):
    """Names of the kernels that a function is lowered to."""
    return applied(lower, function, *shapes)[1]


def arranged(graph):
    return arranged_operands.arranged_operands(graph, traces.Traces())


COPIED = ["swizzle_a_sm90", "gemm_wgmma_sm90"]


@pytest.mark.parametrize(("function", "shapes"), [
    (lambda x, w: product(F.silu(x), w), [(80, 256)]),
    (lambda x, y, w: product(x * y, w), [(2, 40, 256), (2, 40, 256)]),
    (lambda x, w: product((2 * x).view(80, 256), w), [(2, 40, 256)]),
    (lambda x, y, w: product(torch.ops.prims.convert_element_type(x + y, torch.float16), w), [(65, 320), (65, 320)]),
], ids=["activation", "batch", "view", "cast"])  # fmt: skip
def test_pointwise_operations_write_the_order_of_the_product(function, shapes):
    assert launched(function, *shapes) == ["gemm_wgmma_sm90"]


@pytest.mark.parametrize(("function", "shapes"), [
    (lambda x, w: product(x, w), [(80, 256)]),
    (lambda x, w: product(F.silu(x), w), [(64, 256)]),
    (lambda x, w: (product(a := F.silu(x), w), a), [(80, 256)]),
    (lambda x, w: product(a := F.silu(x), w) + a.sum(), [(80, 256)]),
    (lambda x, w: product(a := F.silu(x), w) + a.view(-1, 256), [(80, 256)]),
    (lambda x, y, w: product(torch.cat((x, y)), w), [(40, 256), (40, 256)]),
    (lambda x, w: product(F.silu(x), (w[0], (w[1].float() * 2).to(w[1].dtype), w[2])), [(80, 256)]),
], ids=["input", "few rows", "returned", "read twice", "a view read", "not pointwise", "computed scales"])  # fmt: skip
def test_products_that_keep_their_copy(function, shapes):
    assert launched(function, *shapes) == COPIED


@pytest.mark.parametrize(("others", "shared"), [
    (lambda w: w, True), (lambda w: (w[0], w[1], 2 * w[2]), True),
    (lambda w: (w[0], (2 * w[1].float()).to(w[1].dtype), w[2]), False),
], ids=["the same", "another global scale", "computed scales"])  # fmt: skip
def test_products_of_one_input_share_a_copy(others, shared):
    """As long as the graph computes neither the codes nor the block scales of the weights."""

    def both(x, w):
        return product(x, w), product(x.view(80, 256), others(w))

    found, launches = applied(arranged, both, (2, 40, 256))
    assert launches == ["swizzle_a_sm90"] * shared and len(found) == 2 * shared
    assert len({arranged.node for arranged in found.values()}) == shared
    assert not any(arranged.replaces_a for arranged in found.values())


@pytest.mark.parametrize("layer", [
    lambda x, w: product(x, (*w[:2], product(x, w).float().amax())),
    lambda x, w: product(F.silu(x), w),
], ids=["launches", "operations"])  # fmt: skip
def test_layers_share_the_trace_of_their_copy(layer, monkeypatch):
    made = Mock(side_effect=traces.fwd_only)
    monkeypatch.setattr(traces, "fwd_only", made)

    def model(x, w):
        for _ in range(5):
            x = layer(x, w)
        return x

    found, _ = applied(arranged, model, (80, 256))
    assert len({each.node for each in found.values()}) == 5
    assert made.call_count == 1


def test_products_of_the_same_experts_tokens_share_a_copy():
    """Gate and up of experts that are two products."""
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)) as launches:
        x, offs = torch.empty(800, 256, dtype=BF16, device="cuda"), torch.empty(8, dtype=torch.int32, device="cuda")
        w = (torch.empty(8, 128, 128, dtype=torch.uint8, device="cuda"),
             torch.empty(8, 128, 16, dtype=torch.float8_e4m3fn, device="cuda"),
             torch.empty(8, device="cuda"))  # fmt: skip

        def both(x, offs, data, scales, outer):
            return [of_experts(x, (data, scales, outer), offs, dtype) for dtype in (BF16, torch.float32)]

        lower(make_fx(both)(x, offs, *w).graph)
    assert [one.kernel.__name__ for one in launches] == [*COPIED, COPIED[1]]


def gathered(x, picked):
    return torch.ops.aten.index.Tensor(x, [picked])


def inputs_of_experts():
    """800 tokens and their numbers, offsets, and packed weights of 8 experts."""
    sizes = ((800, 256), BF16), ((800,), torch.int64), ((8,), torch.int32)
    packed = ((8, 256, 128), torch.uint8), ((8, 256, 16), torch.float8_e4m3fn), ((8,), torch.float32)
    return [torch.empty(size, dtype=dtype, device="cuda") for size, dtype in (*sizes, *packed)]


def experts(x, picked, offs, *w):
    """Two products of 8 experts, with an activation between; the tokens are gathered."""
    return of_experts(F.silu(of_experts(gathered(x, picked), w, offs)), w, offs, torch.float32)


def later(x, picked, offs, *w):
    """A product whose offsets nothing before it reads."""
    return of_experts(F.silu(x), w, offs.clone())


@pytest.mark.parametrize(("function", "copies"), [
    (experts, [*COPIED, COPIED[1]]),
    (lambda x, picked, offs, *w: experts(x, picked, offs.clone(), *w), [*COPIED, COPIED[1]]),
    (lambda x, picked, offs, *w: later(gathered(x, picked), picked, offs, *w), COPIED),
    (later, COPIED),
], ids=["inputs", "computed offsets", "gathered", "offsets that may be written late"])  # fmt: skip
def test_activations_between_experts_write_the_order_of_the_product(function, copies):
    """Not where rows would be gathered, nor where the product may read the offsets before they are written. Tokens are
    gathered by the kernel that copies them."""
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)) as launches:
        lower(make_fx(function)(*inputs_of_experts()).graph)
    assert [one.kernel.__name__ for one in launches] == copies


@pytest.mark.parametrize(("function", "gathers"), [
    (experts, True),
    (lambda x, picked, offs, *w: experts(x, picked.to(torch.int32), offs, *w), True),
    (lambda x, picked, offs, *w: (rows := gathered(x, picked), later(rows, picked, offs, *w)), False),
    (lambda x, picked, offs, *w: later(gathered(x, picked.view(2, 400)).view(800, 256), picked, offs, *w), False),
], ids=["experts", "int32", "returned", "a matrix of numbers"])  # fmt: skip
def test_the_copy_of_tokens_gathers_them(function, gathers):
    """Where nothing else reads the gathered tokens."""
    with FakeTensorMode(), enable_python_dispatcher(), dry_run(Target(90)) as launches:
        x, picked, offs, *w = inputs_of_experts()
        graph = make_fx(function)(x, picked, offs, *w).graph
        lower(graph)
        graph.eliminate_dead_code()
    assert [one.constants["INDEXED"] for one in launches if one.kernel.__name__ == "swizzle_a_sm90"] == [gathers]
    assert not gathers or not graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)


def test_an_arranged_operand_of_another_shape_is_refused():
    with FakeTensorMode(), dry_run(Target(90)):
        x, w = torch.empty(80, 256, dtype=BF16, device="cuda"), torch.empty(64, 256, dtype=BF16, device="cuda")
        packed = torch.ops.fp4compile.quantize(w, "nvfp4")
        arranged = torch.empty(1, 4, 64, 64, dtype=BF16, device="cuda")
        arguments = (x, None, None, *packed, "plain @ nvfp4 -> bfloat16")
        with pytest.raises(RuntimeError, match=r"arranged_a: expected shape \(5, 96, 64\), got \(1, 4, 64, 64\)"):
            fp4compile.ops.matmul.scaled_mm_kernels(*arguments, arranged_a=arranged)


class Block(torch.nn.Module):
    """A norm, a gated MLP and a residual sum."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("tokens", "width", "hidden", "dtype"), [
    (65, 320, 1088, torch.bfloat16), (200, 512, 1024, torch.float16), (777, 1024, 4096, torch.bfloat16),
], ids=str)  # fmt: skip
def test_no_bit_depends_on_who_writes_the_operand(tokens, width, hidden, dtype, monkeypatch):
    """Ragged rows, tiles and stages; the launch that copies an operand against the operations that write it."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Block(width, hidden).to(dtype).eval()
        x = torch.randn(tokens, width, dtype=dtype)
    recipe = "nvfp4_weight_only"
    fp4compile.pack_(model, recipe)
    results = []
    for few in (arranged_operands.FEW_ROWS, 10**9):
        monkeypatch.setattr(arranged_operands, "FEW_ROWS", few)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fp4compile.backend(recipe, strict=True), dynamic=False)
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
            results.append(compiled(x))
    assert torch.equal(*results) and results[0].isfinite().all() and results[0].any()
