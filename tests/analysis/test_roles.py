"""Only a proven role counts: a layer's product gets that layer's formats, and any other product is left alone.

Here every operand role has a different format, and rules give layers different recipes. So a role or a layer that is
mistaken for another one shows in the decisions and in the numbers.
"""

import pytest
import torch
import torch.nn.functional as F

import fp4compile
from fp4compile.capture import run_captured
from fp4compile.passes.manager import JointPasses
from fp4compile.recipe import resolve
from tests.helpers.rewritten import UNEVEN, rewritten, roles

Linear, Parameter = torch.nn.Linear, torch.nn.Parameter

FPROP, DGRAD, WGRAD = "mxfp8 x mxfp4", "mxfp8_floor x mxfp8_e5m2", "mxfp8_e5m2 x mxfp8_ceil"
MODEL_ONLY = "gradient x activation that is not the weight gradient of a layer"
INPUT_ONLY = "gradient x parameter that is not the input gradient of a layer"


def quantised(x, role, dim, formats=UNEVEN):
    """x as a product reads it in a role: quantised along a dimension and dequantised, in float32."""
    return fp4compile.quantize(x.detach(), formats[role], dim=dim).dequantize().movedim(-1, dim)


class Quantised(torch.autograd.Function):
    """The oracle: x @ W^T of two matrices, quantised as the recipe says, forward and backward."""

    @staticmethod
    def forward(ctx, x, w, formats):
        ctx.save_for_backward(x, w)
        ctx.formats = formats
        return quantised(x, "fprop_x", 1, formats) @ quantised(w, "fprop_w", 1, formats).t()

    @staticmethod
    def backward(ctx, dy):
        (x, w), formats = ctx.saved_tensors, ctx.formats
        dx = quantised(dy, "dgrad_dy", 1, formats) @ quantised(w, "dgrad_w", 0, formats)
        dw = quantised(dy, "wgrad_dy", 0, formats).t() @ quantised(x, "wgrad_x", 0, formats)
        return dx, dw, None


def linear(x, w, formats=UNEVEN):
    return Quantised.apply(x.reshape(-1, x.shape[-1]), w, formats).reshape(*x.shape[:-1], w.shape[0])


def both(function, oracle, *inputs, recipe=UNEVEN, parameters=(), **overrides):
    """The decisions. Asserts that outputs and gradients equal the oracle's up to the rounding of float32 sums."""
    run, decisions = rewritten(function, recipe, min_n=1, min_k=1, **overrides)
    results = []
    for called in (run, oracle):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        trained = [leaf for leaf in (*leaves, *parameters) if leaf.requires_grad]
        out = called(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), trained)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6 * theirs.abs().max().item())
    return roles(decisions)


def tokens(*shape):
    return torch.randn(shape or (48, 64), generator=torch.Generator().manual_seed(1)).requires_grad_()


def weight(*shape):
    return Parameter(torch.randn(shape or (96, 64), generator=torch.Generator().manual_seed(2)))


class Distilled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Linear(64, 96, bias=False), Linear(64, 96, bias=False)

    def forward(self, x, linears=(F.linear, F.linear)):
        y = linears[0](x, self.student.weight)
        with torch.no_grad():
            target = linears[1](x, self.teacher.weight)
        return y - target


@pytest.mark.parametrize("skipped", ["student", "teacher"])
def test_a_teacher_without_gradients(skipped):
    """All four products share one sequence number, and the teacher's product comes last."""
    model = Distilled()
    oracle = (F.linear, linear) if skipped == "student" else (linear, F.linear)
    found = both(
        model, lambda x: model(x, oracle), tokens(), rules=[(skipped, "skip")], parameters=[model.student.weight]
    )
    why = f"rule {skipped!r}"
    student = [why] * 3 if skipped == "student" else [FPROP, DGRAD, WGRAD]
    assert sorted(found) == sorted([
        ("student", "fprop", student[0]), ("teacher", "fprop", FPROP if skipped == "student" else why),
        ("student", "dgrad", student[1]), ("student", "wgrad", student[2]),
    ])  # fmt: skip


class Adapted(torch.nn.Module):
    """A frozen layer and a trained one that have the same input."""

    def __init__(self):
        super().__init__()
        self.base, self.down = Linear(64, 96, bias=False), Linear(64, 32, bias=False)
        self.up = Linear(32, 96, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x, plain=F.linear, quantised=F.linear):
        inner = quantised(x, self.down.weight)
        return quantised(x, self.base.weight) + plain(inner, self.up.weight)


def test_a_frozen_layer_beside_a_trained_one():
    model = Adapted()
    found = both(
        model, lambda x: model(x, quantised=linear), tokens(), rules=[("up", "skip")],
        parameters=[model.down.weight, model.up.weight],
    )  # fmt: skip
    assert {entry for entry in found if entry[0] == "base"} == {("base", "fprop", FPROP), ("base", "dgrad", DGRAD)}
    assert {entry[2] for entry in found if entry[0] == "up"} == {"rule 'up'"}
    assert ("down", "wgrad", WGRAD) in found and ("down", "dgrad", DGRAD) in found


def test_lora_adapters_stay_in_high_precision():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base = Linear(64, 96, bias=False)
            self.base.requires_grad_(False)
            self.lora_A = torch.nn.ModuleDict({"default": Linear(64, 32, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": Linear(32, 96, bias=False)})

        def forward(self, x, base=F.linear):
            return base(x, self.base.weight) + self.lora_B["default"](self.lora_A["default"](x))

    model = Model()
    adapters = [p for p in model.parameters() if p.requires_grad]
    found = both(model, lambda x: model(x, base=linear), tokens(), parameters=adapters)
    assert {entry[2] for entry in found if entry[0] != "base"} == {"LoRA adapter"}
    assert ("base", "dgrad", DGRAD) in found


def test_an_adapter_that_is_the_last_and_widest_layer_of_its_graph_is_no_output_head():
    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A, self.lora_B = Linear(64, 32, bias=False), Linear(32, 96, bias=False)

        def forward(self, x):
            return self.lora_B(self.lora_A(x))

    model = Alone()
    found = both(model, model, tokens(), parameters=list(model.parameters()))
    assert {entry[2] for entry in found} == {"LoRA adapter"}


W = weight()
BESIDE_A_LAYER = {
    "x @ x^T": lambda x, linear: linear(x, W).sum(1) + (x @ x.t()).sum(1),
    "a scaled weight": lambda x, linear: linear(x, W) + F.linear(x, W * 0.5),
    "a flipped weight": lambda x, linear: linear(x, W) + F.linear(x, W.flip(0)),
    "W @ x and another product": lambda x, linear: linear(x, W).t().sum(0) + (x @ x.t() @ x).sum(1),
}


@pytest.mark.parametrize("case", BESIDE_A_LAYER)
def test_products_of_a_layers_activation_that_are_no_weight_gradients(case):
    function = BESIDE_A_LAYER[case]
    found = both(lambda x: function(x, F.linear), lambda x: function(x, linear), tokens(), parameters=[W])
    layers = [entry for entry in found if entry[2] in (FPROP, DGRAD, WGRAD)]
    assert sorted(product for _, product, _ in layers) == ["dgrad", "fprop", "wgrad"]
    assert len(found) > len(layers)


@pytest.mark.parametrize("computed", [lambda w: w * 0.5, lambda w: w.roll(3, 1), lambda w: torch.tril(w)])
def test_a_weight_computed_from_parameters_is_no_attention(computed):
    """The formats for attention must not be used for `x @ (W * s)^T`."""
    formats = UNEVEN | {"attention_a": "mxfp8", "attention_b": "mxfp8"}

    def function(x):
        return F.linear(x, computed(W))

    found = both(function, function, tokens(), recipe=formats, parameters=[W])
    assert found[0] == ("", "other", "its weight is computed from parameters and is none itself")


def test_a_custom_gradient_is_told_by_what_it_multiplies():
    """The dgrad multiplies dy * 2, which no wgrad multiplies. The wgrad multiplies dy, and its result is scaled."""
    layer = custom_layer(lambda dy, x, w: (dy * 2) @ w, lambda dy, x, w: (dy.t() @ x) * 3)
    found = both(lambda x: layer(x, W), lambda x: custom_oracle(x, W), tokens(), parameters=[W])
    assert [entry[1:] for entry in found][0] == ("fprop", FPROP)
    assert ("", "other", MODEL_ONLY) in found


def custom_oracle(x, w):
    class Oracle(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return quantised(x, "fprop_x", 1) @ quantised(w, "fprop_w", 1).t()

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return quantised(dy * 2, "dgrad_dy", 1) @ quantised(w, "dgrad_w", 0), (dy.t() @ x) * 3

    return Oracle.apply(x, w)


def custom_layer(input_gradient, weight_gradient):
    """x @ w^T with gradients of the caller's: functions of (dy, x, w)."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, dy):
            return input_gradient(dy, *ctx.saved_tensors), weight_gradient(dy, *ctx.saved_tensors)

    return Layer.apply


def test_a_gradient_beside_the_layers_own_is_no_input_gradient():
    """One autograd node multiplies the weight by dy * 2 where the layer's wgrad multiplies dy."""
    layer = custom_layer(lambda dy, x, w: (dy * 2) @ w, lambda dy, x, w: dy.t() @ x)
    run, decisions = rewritten(lambda x: layer(x, W), UNEVEN, min_n=1, min_k=1)
    run(tokens()).square().sum().backward()
    assert sorted(entry[1:] for entry in roles(decisions)) == [
        ("fprop", FPROP),
        ("other", INPUT_ONLY),
        ("wgrad", WGRAD),
    ]


@pytest.mark.parametrize(
    "scaled",
    [
        lambda part: torch.add(W.detach(), part, alpha=3),
        lambda part: torch.sub(W.detach(), part),
        lambda part: part * 3,
        lambda part: W.detach() + part * 3,
    ],
    ids=["added three times", "subtracted", "multiplied", "multiplied and added"],
)
def test_a_multiple_of_the_weight_gradient_is_another_product(scaled):
    """The gradient's part is the product times a number that the layer does not have."""
    layer = custom_layer(lambda dy, x, w: dy @ w, lambda dy, x, w: scaled(dy.t() @ x))
    run, decisions = rewritten(lambda x: layer(x, W), UNEVEN, min_n=1, min_k=1)
    run(tokens()).square().sum().backward()
    assert ("", "other", MODEL_ONLY) in roles(decisions) and "wgrad" not in {entry[1] for entry in roles(decisions)}


def test_a_fixed_feedback_matrix_is_no_input_gradient():
    """The backward multiplies the gradient by the weight of another layer, whose output has another gradient."""
    feedback = weight(96, 64)

    class Aligned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x @ w.t()

        @staticmethod
        def backward(ctx, dy):
            return dy @ feedback, None

    def function(x, linear=F.linear):
        return Aligned.apply(x, W.detach()) + linear(x, feedback) * 3

    run, decisions = rewritten(function, UNEVEN, min_n=1, min_k=1)
    run(tokens()).square().sum().backward()
    assert ("", "other", INPUT_ONLY) in roles(decisions)
    assert [entry[1] for entry in roles(decisions)].count("dgrad") == 1


def test_a_broadcast_is_told_by_its_elements():
    """The batch is as long as the contraction, and each entry of the batch is a different matrix."""
    w = weight(32, 64)
    found = both(
        lambda x: torch.bmm(x, w.unsqueeze(1).expand(32, 32, 64)),
        lambda x: torch.bmm(x, w.unsqueeze(1).expand(32, 32, 64)), tokens(32, 16, 32), parameters=[w],
    )  # fmt: skip
    assert found[0] == ("", "other", "batched matmul with a parameter")


def test_a_broadcast_weight_is_a_layer():
    def oracle(x):
        return linear(x, w.t())

    w = weight(64, 64)
    run, decisions = rewritten(lambda x: torch.bmm(x, w.expand(3, 64, 64)), UNEVEN)
    x = tokens(3, 16, 64)
    torch.testing.assert_close(run(x), oracle(x), rtol=2e-6, atol=2e-6 * oracle(x).abs().max().item())
    assert roles(decisions)[0][1:] == ("fprop", FPROP)


INSIDE = "part of a gradient that is taken inside of the graph (torch.func.grad)"
BOTH_ORIENTATIONS = "its weight is multiplied in both orientations and nothing is a gradient here"


V = weight(32, 96)


def _deep(z):
    return F.linear(F.linear(z, W).tanh(), V)


# Forward products are layers, those of gradients are not, whatever they look like: in a vjp the second product reads V
# alone, because nothing needs the layer's output.
INNER_GRADIENTS = {
    "grad": (lambda x: torch.func.grad(lambda z: F.linear(z, W).square().sum())(x), 1, 1),
    "vjp": (lambda x: torch.func.vjp(_deep, x)[1](torch.ones(len(x), 32))[0], 1, 2),
    "weights": (lambda x: torch.func.grad(lambda w: F.linear(F.linear(x, w).tanh(), V).square().sum())(W), 2, 2),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", INNER_GRADIENTS)
def test_gradients_that_are_taken_inside(name, trained):
    function, layers, gradients = INNER_GRADIENTS[name]
    with torch.set_grad_enabled(trained):
        run, decisions = rewritten(function, {**UNEVEN, "dgrad_dy": None, "dgrad_w": None}, min_n=1, min_k=1)
        run(tokens())
    found = [reason for _, product, reason in roles(decisions) if product != "wgrad"]
    assert found.count(FPROP) == layers
    assert found.count(INSIDE) == gradients
    if not trained:
        assert len(found) == layers + gradients


def test_a_gradient_of_which_nothing_tells_whence_it_comes(monkeypatch):
    """Then the graph tells nothing, either, but that a weight is there in both orientations."""
    monkeypatch.setattr("fp4compile.analysis.find.is_inner_gradient", lambda node: False)
    function, *_ = INNER_GRADIENTS["grad"]
    with torch.no_grad():
        run, decisions = rewritten(function, UNEVEN)
        torch.testing.assert_close(run(tokens()), function(tokens()))
    reasons = [reason for _, _, reason in roles(decisions)]
    assert len(reasons) == 2
    assert all(reason.startswith(BOTH_ORIENTATIONS) for reason in reasons)


CASTS = {
    "bool": lambda w: w.bool().float(),
    "int32": lambda w: w.to(torch.int32).float(),
    "float8_e5m2": lambda w: w.to(torch.float8_e5m2).float(),
    "half": lambda w: w.half().float(),
    "bfloat16": lambda w: w.bfloat16().float(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_that_change_values_are_seen_by_the_quantiser(name):
    """Each of these casts rounds the weight, also where the format is as narrow: E4M3 keeps one bit more than E5M2."""
    w, cast = weight(), CASTS[name]
    formats = UNEVEN | {"fprop_w": "mxfp8", "dgrad_w": "mxfp8"}
    x = tokens()
    found = both(lambda x: F.linear(x, cast(w)), lambda x: linear(x, cast(w), formats), x, recipe=formats)
    products = ["dgrad", "fprop"] if name in ("bool", "int32") else ["dgrad", "fprop", "wgrad"]
    assert sorted(entry[1] for entry in found) == products
    assert not torch.equal(quantised(w, "fprop_w", 1, formats), quantised(cast(w), "fprop_w", 1, formats))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_another_library_are_not_quantised_again(stored):
    """torchao's int8 weight-only layers are of this form; the input's gradient reads the same codes."""
    codes = Parameter(weight().detach().to(stored), requires_grad=False)

    def function(x):
        return F.linear(x, codes.to(x.dtype)) * 0.5

    run, decisions = rewritten(function, UNEVEN)
    x = tokens()
    torch.testing.assert_close(run(x), function(x))
    torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (run, function)))
    name = str(stored).removeprefix("torch.")
    assert [reason for *_, reason in roles(decisions)] == [
        f"its weight is stored as {name}: it is quantised already", INPUT_ONLY,
    ]  # fmt: skip


def test_autocast_multiplies_the_weight_that_it_cast():
    w = weight()

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, w)

    with torch.no_grad():
        run, decisions = rewritten(function, UNEVEN | {"fprop_w": "nvfp4", "fprop_x": "nvfp4"})
        x = tokens().detach()
        a, b = (fp4compile.quantize(value.bfloat16(), "nvfp4") for value in (x, w))
        assert torch.equal(run(x), fp4compile.scaled_mm(a, b))
    assert not torch.equal(b.data, fp4compile.quantize(w.detach(), "nvfp4").data)  # rounding twice gives another code


PIECES = {
    "chunk": (lambda w: w.chunk(3), (96, 64)),
    "split": (lambda w: w.split([32, 64]), (96, 64)),
    "unbind": (lambda w: w.unbind(1), (48, 2, 64)),
    "squeeze": (lambda w: [w.squeeze(0)], (1, 96, 64)),
    "slice": (lambda w: [w[16:80], w[80:]], (96, 64)),
    "select": (lambda w: [w[1]], (2, 48, 64)),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_a_parameter_are_layers(name):
    pieces, shape = PIECES[name]
    w = weight(*shape)

    def function(x, linear=F.linear):
        return torch.cat([linear(x * (1 + i), piece) for i, piece in enumerate(pieces(w))], -1)

    found = both(function, lambda x: function(x, linear), tokens(), parameters=[w])
    assert {entry[2] for entry in found} == {FPROP, DGRAD, WGRAD}
    assert len(found) == 3 * len(pieces(w))


def test_chunked_activations_are_two_activations():
    a, b = weight(96, 32), weight(96, 32)

    def function(x, linear=F.linear):
        left, right = x.chunk(2, dim=-1)
        return linear(left, a) + linear(right, b) * 2

    assert len(both(function, lambda x: function(x, linear), tokens(), parameters=[a, b])) == 6


def test_multi_head_attention_is_quantised():
    attention = torch.nn.MultiheadAttention(64, 2, bias=False, batch_first=True)
    run, decisions = rewritten(lambda q, k: attention(q, k, k)[0], UNEVEN)
    run(tokens(2, 32, 64), tokens(2, 16, 64)).sum().backward()
    layers = [entry for entry in roles(decisions) if entry[0]]
    assert {entry[0] for entry in layers} == {"in_proj_weight", "out_proj"}
    assert sorted(entry[1] for entry in layers) == ["dgrad"] * 3 + ["fprop"] * 3 + ["wgrad"] * 3
    assert {entry[2] for entry in layers} == {FPROP, DGRAD, WGRAD}


EINSUMS = {
    "btd,ed->bte": (96, 64),
    "ed,btd->bte": (96, 64),
    "btd,hed->bthe": (4, 24, 64),
    "btd,dhe->bthe": (64, 4, 24),
    "btd,hde->bthe": (4, 64, 24),
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum_linears(equation):
    w = weight(*EINSUMS[equation])
    operands = (lambda x: (w, x)) if equation.startswith("ed") else (lambda x: (x, w))

    def oracle(x):
        flat = {"btd,hed->bthe": lambda: w.flatten(0, 1), "btd,dhe->bthe": lambda: w.flatten(1).t(),
                "btd,hde->bthe": lambda: w.transpose(1, 2).flatten(0, 1)}.get(equation, lambda: w)()  # fmt: skip
        return linear(x, flat).view(*x.shape[:-1], *((4, 24) if w.dim() == 3 else (96,)))

    x = tokens(2, 48, 64)
    found = both(lambda x: torch.einsum(equation, *operands(x)), oracle, x, parameters=[w])
    assert sorted(entry[2] for entry in found) == sorted([FPROP, DGRAD, WGRAD])


def test_a_weight_on_the_left_has_its_own_roles():
    w = weight(96, 64)
    found = both(lambda x: (w @ x.t()).t(), lambda x: linear(x, w), tokens(), parameters=[w])
    assert sorted(entry[1:] for entry in found) == [("dgrad", DGRAD), ("fprop", FPROP), ("wgrad", WGRAD)]


def test_a_layer_applied_twice():
    layer = Linear(64, 64, bias=False)

    def function(x, linear=F.linear):
        return linear(linear(x, layer.weight).relu(), layer.weight)

    found = both(function, lambda x: function(x, linear), tokens(), parameters=[layer.weight])
    assert sorted(entry[2] for entry in found) == sorted([FPROP, DGRAD, WGRAD] * 2)


def test_a_layer_applied_again_without_gradients():
    """Two products of the same weight and input. They differ by their gradients, and only one of them has a wgrad."""
    w = weight(64, 64)

    def function(x, linear=F.linear):
        return linear(x, w.detach()).relu() + linear(x, w) * 2

    found = both(function, lambda x: function(x, linear), tokens(), parameters=[w])
    assert sorted(entry[2] for entry in found) == sorted([FPROP, FPROP, DGRAD, DGRAD, WGRAD])


@pytest.mark.parametrize("product", ["one matrix", "a batch"])
def test_square_blocks_never_lie_across_a_batch(product):
    """For the same layer F.linear multiplies one matrix of tokens and bmm a batch, whose square blocks would differ."""
    w, x = weight(64, 64), tokens(3, 16, 64).detach()
    functions = {"one matrix": lambda x: x @ w, "a batch": lambda x: torch.bmm(x, w.expand(3, 64, 64))}
    run, decisions = rewritten(functions[product], UNEVEN | {"fprop_x": "mxfp8_32x32"})
    run(x)
    reason = "format mxfp8_32x32 has square blocks, and the operand is a batch of matrices"
    assert roles(decisions)[0][2] == ("mxfp8_32x32 x mxfp4" if product == "one matrix" else reason)


def test_both_orientations_in_training_are_two_layers():
    w = weight(96, 64)

    def function(x, linear=F.linear):
        return linear(linear(x, w).relu(), w.t())

    found = both(function, lambda x: function(x, linear), tokens(), parameters=[w])
    assert sorted(entry[2] for entry in found) == sorted([FPROP, DGRAD, WGRAD] * 2)


def test_parameters_in_nested_regions_are_named():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Linear(64, 96)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: self.layer(-x), (x,))

    model = Branches()
    with torch.no_grad():
        run, decisions = rewritten(model, UNEVEN)
        torch.testing.assert_close(run(tokens()), model(tokens()))
    assert roles(decisions) == [("layer", "other", "inside cond: matmuls of nested regions are not quantised")] * 2


ATTENTION_TOO = UNEVEN | {"attention_a": "mxfp8", "attention_b": "mxfp8"}


def test_bodies_of_nested_regions_are_not_rewritten():
    """Inductor hands them to the joint passes one by one. No input is a parameter there: layers look like attention."""
    model, seen = torch.nn.Sequential(Linear(64, 64)), []

    def passes(module, known, forward_outputs):
        for graph in (*(body.graph for body in module.children()), module.graph):
            before = str(graph)
            JointPasses(resolve(ATTENTION_TOO), known.inputs, lambda rows, runs: seen.extend(rows))(graph)
            assert str(graph) == before
        return module.forward

    with torch.no_grad():
        run_captured(lambda x: torch.cond(x.sum() > 0, model, lambda x: model(-x), (x,)), passes)(tokens())
    assert [row.reason for row in seen] == ["inside cond: matmuls of nested regions are not quantised"] * 2


def test_bodies_of_nested_regions_are_not_rewritten_in_training():
    """AOTAutograd partitions the body that several calls share, and its partitioner runs the joint passes."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Linear(64, 64)

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return self.layer(x).tanh()

    model = torch.nn.Sequential(*(Block() for _ in range(2)))
    report = fp4compile.explain(model, tokens(), recipe=ATTENTION_TOO)
    assert {row.reason for row in report.rows} == {
        "inside invoke_subgraph: matmuls of nested regions are not quantised"
    }
    assert report.graphs == 1
