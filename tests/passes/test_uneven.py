"""Models whose layers and operands all differ from each other, so that a mix-up changes the numbers.

Layers have different recipes, the two operands of a product have different formats, two layers have two pieces of one
tensor as activations, and weights are operand A or operand B. The rewritten joint graphs run as they are, without code
generation. They are compared with the same model composed from `quantize` and `dequantize`.
"""

import pytest
import torch
from torch import nn

import fp4compile
from fp4compile.recipe import Recipe, named
from tests.helpers.rewritten import rewritten

# The two formats of a product differ, and each role differs from the roles that it could be mistaken for.
UNEVEN = Recipe(
    name="uneven", fprop_x="mxfp8", fprop_w="mxfp4", dgrad_dy="mxfp4", dgrad_w="mxfp8_32x32", wgrad_dy="mxfp8_e5m2",
    wgrad_x="mxfp8_floor",
)  # fmt: skip
PRODUCTS = ("fprop", "dgrad", "wgrad")
TOKENS = 48


class Captured:
    """A model whose graphs are rewritten and run without code generation."""

    def __init__(self, model, recipe):
        self.run, self.decisions = rewritten(model, recipe)

    @property
    def treatments(self):
        """By (layer, product), how the operands A and B are quantised, or why the product is left alone."""
        return {(d.gemm.module, d.gemm.product): d.reason or (d.a, d.b) for d in self.decisions}

    def formats(self, module, product):
        """Formats of the operands A and B of one product."""
        return tuple(None if one is None else one.format for one in self.treatments[module, product])


def as_seen(x, fmt, dim, outer=None, hadamard=False):
    """x as a product reads it: quantised along `dim` and dequantised; x itself where there is no format."""
    if fmt is None:
        return x
    outer = None if outer is None else torch.tensor(outer)
    return fp4compile.quantize(x, fmt, dim=dim, outer=outer, hadamard=hadamard).dequantize().movedim(-1, dim)


class Oracle(torch.autograd.Function):
    """x [tokens, K], w [N, K] -> [tokens, N], with the recipe's formats in all three products."""

    @staticmethod
    def forward(ctx, x, w, recipe, outer):
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        return as_seen(x, recipe.fprop_x, 1, outer) @ as_seen(w, recipe.fprop_w, 1).t()

    @staticmethod
    def backward(ctx, dy):
        (x, w), recipe = ctx.saved_tensors, ctx.recipe
        hadamard = "wgrad" in recipe.hadamard
        dx = as_seen(dy, recipe.dgrad_dy, 1) @ as_seen(w, recipe.dgrad_w, 0)
        transformed = as_seen(x, recipe.wgrad_x, 0, hadamard=hadamard)
        dw = as_seen(dy, recipe.wgrad_dy, 0, hadamard=hadamard).t() @ transformed
        return dx, dw, None, None


def oracle(layer, x, recipe, outer=None):
    y = Oracle.apply(x.reshape(-1, x.shape[-1]), layer.weight, recipe, outer)
    return y.view(*x.shape[:-1], -1) if layer.bias is None else y.view(*x.shape[:-1], -1) + layer.bias


def step(function, model, *args):
    """The outputs, and the gradients of arguments and parameters, for one random gradient of the outputs."""
    args = [arg.detach().requires_grad_() for arg in args]
    outputs = function(*args)
    generator = torch.Generator().manual_seed(7)
    gradients = [torch.randn(y.shape, generator=generator) for y in outputs]
    wanted = [*args, *model.parameters()]
    return [y.detach() for y in outputs], torch.autograd.grad(outputs, wanted, gradients)


def assert_same_step(got, expected):
    """Assert equality up to the order of float32 sums: 1e-5 of the largest value."""
    for one, other in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * other.abs().max().item())


# ---------------------------------------------------------------- one recipe for each layer


class Parallel(nn.Module):
    """Layers of different widths with the same input, so that no layer depends on the rounding of another."""

    WIDTHS = {"plain": 96, "mixed": 64, "other": 32}

    def __init__(self):
        super().__init__()
        for name, width in self.WIDTHS.items():
            setattr(self, name, nn.Linear(64, width, bias=name == "mixed"))

    def forward(self, x):
        return [getattr(self, name)(x) for name in self.WIDTHS]


TRAIN = named("nvfp4_train").replace(stochastic_rounding=())  # an oracle cannot know the seeds, which the graph draws
SCALES = {"plain": 0.004, "mixed": 0.001, "other": 0.002}


@pytest.mark.parametrize(
    "recipe, layers",
    [
        (named("nvfp4_static").replace(static_scales=SCALES), {"mixed": "mxfp8", "other": "mxfp4"}),
        (named("mxfp8").replace(rules=[("plain", "nvfp4_static")], static_scales=SCALES), {"mixed": "nvfp4_rowwise"}),
        (TRAIN, {"mixed": "mxfp8_32x32", "other": "nvfp4_weight_only"}),
        (named("nvfp4_rowwise"), {"plain": "float8_rowwise", "mixed": "mxfp8_floor"}),
        (UNEVEN, {"plain": "nvfp4", "other": "mxfp8"}),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_each_layer_by_the_recipe_of_its_rule(recipe, layers):
    recipe = recipe.replace(rules=[*recipe.rules, *layers.items()])
    of_layer = {name: recipe for name in Parallel.WIDTHS}
    of_layer |= {rule.pattern: named(rule.action) for rule in recipe.rules}

    def by_hand(x):
        static = {name: one.activation_scale == "static" for name, one in of_layer.items()}
        return [oracle(getattr(model, name), x, of_layer[name], SCALES[name] if static[name] else None)
                for name in Parallel.WIDTHS]  # fmt: skip

    model, x = Parallel(), torch.randn(TOKENS, 64)
    captured = Captured(model, recipe)
    assert_same_step(step(captured.run, model, x), step(by_hand, model, x))
    for name, chosen in of_layer.items():
        assert captured.formats(name, "fprop") == (chosen.fprop_x, chosen.fprop_w)


@pytest.mark.parametrize("recipe, rules", [("mxfp8", {"mixed": "nvfp4_train"}), ("nvfp4_train", {"other": "mxfp8"})])
def test_switches_of_training_are_those_of_the_layer(recipe, rules):
    """Stochastic rounding and the Hadamard transform are on in one layer (mixed) and off in another (other)."""
    model = Parallel()
    captured = Captured(model, named(recipe).replace(rules=list(rules.items())))
    step(captured.run, model, torch.randn(TOKENS, 64))

    def switches(layer, product):
        return [(one.stochastic, one.hadamard) for one in captured.treatments[layer, product]]

    assert switches("mixed", "fprop") == [(False, False), (False, False)]
    assert switches("mixed", "dgrad") == [(True, False), (False, False)]
    assert switches("mixed", "wgrad") == [(True, True), (False, True)]
    for product in PRODUCTS:
        assert switches("other", product) == [(False, False), (False, False)]


# ---------------------------------------------------------------- two formats in a product, weights on either side


class WeightRight(nn.Module):
    """x @ W, the weight [K, N]."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 96))

    def forward(self, x):  # [tokens, 64]
        return (x @ self.matrix,)

    def by_hand(self, x):
        return (Oracle.apply(x, self.matrix.t(), UNEVEN, None),)


class WeightLeft(nn.Module):
    """W @ x: operand A is the weight [N, K], and the tokens are the columns of operand B."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(96, 64))

    def forward(self, x):  # [64, tokens]
        return (self.matrix @ x,)

    def by_hand(self, x):
        return (Oracle.apply(x.t(), self.matrix, UNEVEN, None).t(),)


class WeightLeftTransposed(WeightLeft):
    """W.T @ x.T with the weight [K, N]. Its dgrad yields the transposed gradient of x, with the weight as B."""

    def forward(self, x):  # [tokens, 96]
        return (self.matrix.t() @ x.t(),)

    def by_hand(self, x):
        return (Oracle.apply(x, self.matrix.t(), UNEVEN, None).t(),)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(64, 96)

    def forward(self, x):
        return (self.matrix(x),)

    def by_hand(self, x):
        return (oracle(self.matrix, x, UNEVEN),)


@pytest.mark.parametrize(
    "kind, shape, weight_left",
    [
        (Layer, (TOKENS, 64), False),
        (Layer, (3, 16, 64), False),
        (WeightRight, (TOKENS, 64), False),
        (WeightLeft, (64, TOKENS), True),
        (WeightLeftTransposed, (TOKENS, 96), True),
    ],
)
def test_activation_and_weight_in_different_formats(kind, shape, weight_left):
    model, x = kind(), torch.randn(shape)
    captured = Captured(model, UNEVEN)
    assert_same_step(step(captured.run, model, x), step(model.by_hand, model, x))
    assert captured.formats("matrix", "fprop") == (("mxfp4", "mxfp8") if weight_left else ("mxfp8", "mxfp4"))
    assert set(captured.formats("matrix", "dgrad")) == {"mxfp4", "mxfp8_32x32"}
    assert set(captured.formats("matrix", "wgrad")) == {"mxfp8_e5m2", "mxfp8_floor"}


def test_inference_with_the_weight_on_the_left():
    model, x = WeightLeft(), torch.randn(64, TOKENS)
    captured = Captured(model, UNEVEN)
    with torch.no_grad():
        got, expected = captured.run(x)[0], model.by_hand(x)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert captured.formats("matrix", "fprop") == ("mxfp4", "mxfp8")


# ---------------------------------------------------------------- pieces of one tensor

PIECES = {
    "chunk": ((TOKENS, 128), lambda x: x.chunk(2, dim=-1)),
    "split": ((TOKENS, 128), lambda x: x.split(64, dim=-1)),
    "split in rows": ((2 * TOKENS, 64), lambda x: x.split([TOKENS, TOKENS])),
    "unbind": ((2, TOKENS, 64), lambda x: x.unbind()),
    "unbind in the middle": ((TOKENS, 2, 64), lambda x: x.unbind(1)),
    "slices": ((TOKENS, 128), lambda x: (x[:, :64], x[:, 64:])),
    "views of chunks": ((4, 12, 128), lambda x: [piece.reshape(TOKENS, 64) for piece in x.chunk(2, dim=-1)]),
    "of a function": ((TOKENS, 128), lambda x: x.sin().chunk(2, dim=-1)),
    "unsafe_chunk": ((TOKENS, 128), lambda x: x.unsafe_chunk(2, dim=-1)),
}


@pytest.mark.parametrize("name", PIECES)
def test_two_pieces_of_one_tensor_are_two_activations(name):
    """The layers have equal sizes and formats, so that only the piece tells their activations apart."""

    class Pieces(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)

        def forward(self, x):
            first, second = split(x)
            return self.first(first), self.second(second)

    shape, split = PIECES[name]
    model, x = Pieces(), torch.randn(shape)

    def by_hand(x):
        first, second = split(x)
        return oracle(model.first, first, UNEVEN), oracle(model.second, second, UNEVEN)

    captured = Captured(model, UNEVEN)
    assert_same_step(step(captured.run, model, x), step(by_hand, model, x))
    expected = {(layer, product) for layer in ("first", "second") for product in PRODUCTS}
    assert captured.treatments.keys() == expected
    assert not [reason for reason in captured.treatments.values() if isinstance(reason, str)]


# ---------------------------------------------------------------- rules that decide for no layer


def test_explain_tells_the_rules_that_decide_for_no_layer():
    rules = [("mixed", "skip"), ("*.gate", "skip"), ("mix*", "mxfp4")]
    with pytest.warns(UserWarning) as warned:
        fp4compile.explain(Parallel(), torch.randn(TOKENS, 64), recipe=named("mxfp8").replace(rules=rules))
    texts = [str(warning.message) for warning in warned]
    assert [text for text in texts if "decides for no layer" in text] == [
        "rule '*.gate' of recipe 'mxfp8' decides for no layer",
        "rule 'mix*' of recipe 'mxfp8' decides for no layer",
    ]
