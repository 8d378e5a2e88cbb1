"""Products of experts, grouped, batched, gathered or in a loop, equal the same composed by hand, expert by expert."""

import pytest
import torch
import torch.nn.functional as F

import fp4compile
from fp4compile.recipe import named
from tests.helpers.by_hand import STATIC, assert_rounds_to, by_hand
from tests.helpers.rewritten import UNEVEN, rewritten, roles

K, N = 80, 48
Parameter = torch.nn.Parameter


def offsets(sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def recipe_of(name):
    """Without random rounding: where random bits lie is not what these tests are about."""
    chosen = named(name).replace(stochastic_rounding=(), min_m=1)
    return chosen.replace(static_scales=STATIC | {"w": STATIC[""]}) if name == "nvfp4_static" else chosen


def weight(*shape):
    return Parameter(torch.randn(shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)) / 4)


def tokens(*shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = x * 2.0 ** torch.arange(shape[0]).fmod(5).view(-1, *[1] * (len(shape) - 1))
    return x.bfloat16().requires_grad_()


class Experts(torch.nn.Module):
    """One grouped product. stored: the weight's shape, as (E, N, K) or as (E, K, N)."""

    def __init__(self, experts, stored="enk"):
        super().__init__()
        self.w = weight(experts, *{"enk": (N, K), "ekn": (K, N)}[stored])
        self.stored = stored

    @property
    def matrices(self):
        """[E, N, K]"""
        return self.w if self.stored == "enk" else self.w.transpose(1, 2)

    def forward(self, x, offs):
        return F.grouped_mm(x, self.matrices.transpose(1, 2), offs=offs)


@pytest.mark.parametrize("turned", [False, True])
def test_groups_that_are_columns(turned):
    """W @ x is (x^T @ W^T)^T in every bit, and so are both gradients. turned: the tokens lie as columns."""
    offs, dy, found = offsets([3, 0, 14]), torch.randn(N, 24).bfloat16(), []
    for columns in (True, False):
        layer, x = Experts(3), tokens(24, K).detach()
        x = (x.t().contiguous() if turned and columns else x).requires_grad_()

        def function(x, offs, layer=layer, columns=columns):
            if not columns:
                return layer(x, offs)
            return F.grouped_mm(layer.w, x if turned else x.t(), offs=offs)

        run, decisions = rewritten(function, UNEVEN, min_m=1)
        y = run(x, offs)
        assert y.is_contiguous()
        y.backward(dy if columns else dy.t())
        found.append((y if columns else y.t(), x.grad.t() if turned and columns else x.grad, layer.w.grad))
        assert sorted(product for _, product, _ in roles(decisions)) == ["dgrad", "fprop", "wgrad"]
        assert not any(d.reason for d in decisions)
    assert all(map(torch.equal, *found))


class Uneven(torch.nn.Module):
    """Two layers of one input but other groups, a frozen one, and one whose weight is computed."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.frozen = weight(3, K, N), weight(3, K, N), weight(3, N, K).requires_grad_(False)

    def forward(self, x, offs, others):
        gate, up = F.grouped_mm(x, self.gate, offs=offs), F.grouped_mm(x, self.up, offs=others)
        return F.grouped_mm(gate * up, self.frozen, offs=offs)


def test_roles_are_proven():
    model, x = Uneven(), tokens(20, K)
    run, decisions = rewritten(model, UNEVEN, min_m=1)  # the last and widest layer of experts is no output head
    run(x, offsets([3, 0, 17]), offsets([5, 5, 5])).sum().backward()
    fprop, wgrad, dgrad = "mxfp8 x mxfp4", "mxfp8_e5m2 x mxfp8_ceil", "mxfp8_floor x mxfp8_e5m2"
    assert sorted(roles(decisions)) == sorted([
        ("gate", "fprop", fprop), ("up", "fprop", fprop), ("frozen", "fprop", fprop), ("frozen", "dgrad", dgrad),
        ("gate", "wgrad", wgrad), ("up", "wgrad", wgrad), ("gate", "dgrad", dgrad), ("up", "dgrad", dgrad),
    ])  # fmt: skip
    grouped = {d.gemm.module: d.gemm.offs for d in decisions if d.gemm.product == "wgrad"}
    assert grouped["gate"] is not grouped["up"]


def test_groups_of_another_product_are_no_wgrad():
    """The very product of a layer's wgrad, but for the groups: it is not that layer's."""
    w = weight(3, K, N)

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, offs, others):
            ctx.save_for_backward(x, others)
            return F.grouped_mm(x, w, offs=offs)

        @staticmethod
        def backward(ctx, dy):
            x, others = ctx.saved_tensors
            return None, F.grouped_mm(x.t(), dy, offs=others), None, None

    run, decisions = rewritten(lambda x, *offs: Other.apply(x, w, *offs), UNEVEN, min_m=1)
    run(tokens(20, K), offsets([3, 0, 17]), offsets([5, 5, 5])).sum().backward()
    assert roles(decisions)[-1][1:] == ("other", "gradient x activation that is not the weight gradient of a layer")


@pytest.mark.parametrize(("name", "weight_first"), [
    ("nvfp4", False), ("nvfp4_train", True), ("mxfp8", False), ("float8_rowwise", True)])  # fmt: skip
def test_batched_products_equal_hand_composition(name, weight_first):
    """As Llama 4 writes its experts; and with the weight from the left."""
    recipe, w = recipe_of(name), weight(3, N, K)

    def batched(x):
        return torch.bmm(w, x.transpose(1, 2)).transpose(1, 2) if weight_first else torch.bmm(x, w.transpose(1, 2))

    x = tokens(3, 21, K)
    run, decisions = rewritten(batched, recipe)
    y = run(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert [d.reason for d in decisions] == [None] * 3 and {d.gemm.groups for d in decisions} == {"batched"}
    for g in range(3):
        expected = by_hand(recipe, x.detach()[g], w.detach()[g], None, dy[g], torch.bfloat16)
        for ours, exact in zip((y.detach()[g], x.grad[g], w.grad[g]), expected, strict=True):
            assert_rounds_to(ours.double(), exact, torch.bfloat16)


@pytest.mark.parametrize(("name", "weight_first", "experts"), [
    ("nvfp4", False, 1), ("nvfp4", False, 3), ("nvfp4", True, 1), ("nvfp4", True, 3), ("mxfp8", True, 3),
    ("nvfp4_weight_only", False, 3), ("float8_rowwise", True, 3)])  # fmt: skip
def test_gathered_products_equal_hand_composition(name, weight_first, experts):
    """As transformers' batched_mm writes experts: a copy of its expert's weight for each token."""
    recipe, w = recipe_of(name), weight(experts, N, K)

    def gathered(x, index):
        if weight_first:
            return torch.bmm(w[index], x.unsqueeze(-1)).view(5, N)
        return torch.bmm(x.unsqueeze(1), w[index].transpose(1, 2)).squeeze(1)

    x, index = tokens(5, K).detach(), torch.tensor([2, 0, 2, 2, 1]) % experts
    run, decisions = rewritten(gathered, recipe)
    y = run(x, index)
    product, *others = decisions
    assert (product.reason, product.gemm.groups, product.gemm.dims) == (None, "gathered", (5, N, K))
    # The gradient of the weight, which torch 2.13 multiplies by elements and torch 2.11 as matrices.
    assert {other.reason for other in others} <= {"batched matmul of a gradient"}
    for s, expert in enumerate(index):
        exact, *_ = by_hand(recipe.replace(wgrad_x=None, wgrad_dy=None, dgrad_dy=None, dgrad_w=None, hadamard=()),
                            x[s : s + 1], w.detach()[expert], None, torch.zeros(1, N), torch.bfloat16)  # fmt: skip
        assert_rounds_to(y.detach()[s : s + 1].double(), exact, torch.bfloat16)


def test_a_loop_over_experts():
    """Each expert's products have the recipe's formats, for any number of tokens."""
    w = weight(3, N, K)

    def loop(x, chosen):
        out = x.new_zeros(x.shape[0], N)
        for expert in range(3):
            rows = torch.where(chosen == expert)[0]
            out = out.index_add(0, rows, F.linear(x[rows], w[expert]))
        return out

    run, decisions = rewritten(loop, UNEVEN, min_m=1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(tokens(20, K), torch.arange(20) % 3).sum().backward()
    assert sorted(product for _, product, _ in roles(decisions)) == 3 * ["dgrad"] + 3 * ["fprop"] + 3 * ["wgrad"]
    assert not any(d.reason for d in decisions)


def reasons(function, *args, recipe="mxfp8"):
    with torch.no_grad():
        return [row.reason for row in fp4compile.explain(function, *args, recipe=recipe).rows]


def test_what_is_left_alone_has_a_reason():
    w, x, offs = weight(3, K, N), tokens(20, K).detach(), offsets([3, 0, 17])
    both = torch.randn(3, K, 16, dtype=torch.bfloat16)
    square = fp4compile.Recipe(fprop_x="mxfp8_32x32", fprop_w="mxfp8")
    assert reasons(lambda x, b: F.grouped_mm(x, b * 2, offs=offs), x, both) == ["grouped matmul without a parameter"]
    assert reasons(lambda x: F.grouped_mm(x, w * 2, offs=offs), x) == [
        "its weight is computed from parameters and is none itself"
    ]
    assert reasons(lambda x: F.grouped_mm(x, w, offs=offs), x, recipe=square) == [
        "format mxfp8_32x32 has square blocks, and groups may have any number of rows"
    ]
    one = fp4compile.Recipe(fprop_w="mxfp8", rules=[("*", "skip")])
    assert reasons(lambda x: F.grouped_mm(x, w, offs=offs), x, recipe=one) == ["rule '*'"]


def test_weights_of_experts_leave_inference_graphs():
    model = Experts(3)
    compiled = torch.compile(model, backend=fp4compile.backend("nvfp4", min_m=1), fullgraph=True)
    x, offs = tokens(20, K).detach(), offsets([3, 0, 17])
    with torch.no_grad():
        before = compiled(x, offs)
        assert len(model.w._fp4compile_packed.packed) == 1
        model.w.mul_(2)
        assert torch.equal(compiled(x, offs), 2 * before)
