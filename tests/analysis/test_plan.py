"""Which layers a recipe quantises, and why it leaves others alone, as `explain` reports it."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.analysis.find import find
from fp4compile.analysis.module_names import clean_name, module_name
from fp4compile.analysis.plan import plan
from fp4compile.recipe import named


class Block(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.q, self.up = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x):
        return self.up(self.q(x).relu())


class Model(torch.nn.Module):
    def __init__(self, blocks=6):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = torch.nn.Linear(64, 96)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def reasons(recipe, model=None, x=None):
    """{module: why its forward product is left alone, None where it is quantised}."""
    with torch.no_grad():
        report = fp4compile.explain(model or Model(), torch.randn(8, 64) if x is None else x, recipe=recipe)
    return {row.module: row.reason for row in report.rows}


def quantised(recipe, **kwargs):
    return {module for module, reason in reasons(recipe, **kwargs).items() if reason is None}


def blocks(*indices):
    return {f"layers.{i}.{name}" for i in indices for name in ("q", "up")}


def test_every_layer_but_the_head():
    assert quantised("mxfp8") == blocks(*range(6))
    assert reasons("mxfp8")["lm_head"] == "output head"
    assert quantised({"recipe": "mxfp8", "skip_lm_head": False}) == blocks(*range(6)) | {"lm_head"}


def test_first_and_last_blocks():
    recipe = {"recipe": "mxfp8", "skip_first_blocks": 2, "skip_last_blocks": 3}
    assert quantised(recipe) == blocks(2)
    assert reasons(recipe)["layers.1.q"] == "block 1 is among the first 2"
    assert reasons(recipe)["layers.5.up"] == "block 5 is among the last 3"


def test_number_of_blocks_given():
    assert quantised({"recipe": "mxfp8", "skip_last_blocks": 3, "num_blocks": 7}) == blocks(*range(4))


def test_blocks_by_number_where_names_have_none():
    """A block that is compiled alone does not know its number, and `num_blocks` does not help."""
    block = torch.nn.Sequential()
    block.add_module("up", torch.nn.Linear(64, 64))
    for fields in ({"skip_first_blocks": 1}, {"skip_last_blocks": 1, "num_blocks": 4}):
        with pytest.warns(UserWarning, match="skips blocks by their number.*'up.weight'"):
            assert quantised({"recipe": "mxfp8", **fields}, model=block) == {"up"}


def test_globs_respect_dots():
    recipe = {"recipe": "mxfp8", "rules": [("layers.1.*", "skip")]}
    assert quantised(recipe) == blocks(0, *range(2, 6))
    assert reasons(recipe)["layers.1.q"] == "rule 'layers.1.*'"


def test_first_matching_rule_decides_and_outranks_the_defaults():
    rules = [("layers.0.q", "quantize"), ("*.q", "skip"), ("lm_head", "quantize")]
    recipe = {"recipe": "mxfp8", "skip_first_blocks": 1, "rules": rules}
    assert quantised(recipe) == {"layers.0.q", "lm_head"} | {f"layers.{i}.up" for i in range(1, 6)}


def test_rule_gives_a_layer_another_recipe():
    report = fp4compile.explain(Model(2), torch.randn(8, 64), recipe={"recipe": "nvfp4", "rules": [("*.up", "mxfp8")]})
    formats = {(row.module, row.product): (row.left, row.right) for row in report.quantised}
    assert formats["layers.0.up", "wgrad"] == ("mxfp8", "mxfp8")
    assert formats["layers.0.q", "wgrad"] == ("nvfp4", "nvfp4")


@pytest.mark.parametrize("limit,shape", [("min_m", "M=8"), ("min_n", "N=64"), ("min_k", "K=64")])
def test_minimum_dimensions(limit, shape):
    recipe = {"recipe": "mxfp8", limit: 65}
    assert reasons(recipe)["layers.0.q"] == f"{shape} is below {limit}=65"
    assert quantised(recipe | {limit: 8}) == blocks(*range(6))
    for action in ("quantize", "nvfp4"):  # rules outrank the defaults, and no limits
        ruled = reasons(recipe | {"rules": [("layers.0.q", action)]}, model=Model(1))
        assert ruled["layers.0.q"] == f"{shape} is below {limit}=65"


def test_limits_are_those_of_the_layer_in_the_backward_too():
    """wgrad is [N, tokens] x [tokens, K]. A small number of tokens must not count as a small K."""
    report = fp4compile.explain(torch.nn.Linear(64, 96), torch.randn(8, 64, requires_grad=True), recipe="mxfp8")
    assert {(row.product, row.m, row.n, row.k, row.reason) for row in report.rows} == {
        ("fprop", 8, 96, 64, None), ("wgrad", 96, 64, 8, None), ("dgrad", 8, 64, 96, None),
    }  # fmt: skip


class Odd(torch.nn.Module):
    """One product of each kind that is left alone."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Parameter(torch.randn(64, 64))
        self.conv = torch.nn.Conv1d(64, 64, 3)
        self.fast = torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True).eval()
        self.matrix = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):  # [4, 8, 64]
        a = torch.bmm(self.shared.expand(4, -1, -1), x.transpose(1, 2)).transpose(1, 2)
        b = self.conv(x.transpose(1, 2)).sum()
        c = F.scaled_dot_product_attention(*(x.unflatten(-1, (2, 32)).transpose(1, 2),) * 3).sum()
        d = torch.baddbmm(a, x, a.transpose(1, 2) @ a)
        e = self.matrix @ self.matrix
        return d + b + c + e.sum() + self.fast(x)


def test_everything_else_that_multiplies_has_a_reason():
    with torch.no_grad():
        report = fp4compile.explain(Odd(), torch.randn(4, 8, 64), recipe="mxfp8")
    found = {row.reason for row in report.rows}
    assert found == {
        "batched matmul with a parameter",
        "convolution",
        "fused attention: its matmuls lie inside one kernel",
        "torch's fast path of a transformer layer: its matmuls lie inside one operator",
        "batched matmul with an added term (baddbmm)",
        "no operand is a parameter, and the recipe leaves attention in high precision",
        "both operands are parameters",
    }


@torch.library.custom_op("tests::expert_mm", mutates_args=())
def expert_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@expert_mm.register_fake
def _(x, w):
    return x @ w


def test_operators_of_other_libraries_are_named():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    with torch.no_grad():
        report = fp4compile.explain(lambda x: expert_mm(x, weight), torch.randn(4, 64), recipe="mxfp8")
    assert [row.reason for row in report.rows] == ["operator tests.expert_mm.default"]


class Masked(torch.nn.Linear):
    def __init__(self, in_region):
        super().__init__(64, 64)
        self.register_buffer("mask", torch.ones(64, 64))
        self.in_region = in_region

    def forward(self, x):
        def run(x):
            return F.linear(x, self.weight * self.mask)

        return torch.cond(x.sum() > 0, run, torch.relu, (x,)) if self.in_region else run(x)


@pytest.mark.parametrize("in_region", [False, True])
def test_a_weight_times_a_buffer_is_no_attention(in_region):
    """As pruning makes it."""
    recipe = {"recipe": "mxfp8", "attention_a": "mxfp8", "attention_b": "mxfp8"}
    found = reasons(recipe, model=Masked(in_region))
    assert [*found.values()] == ["its weight is computed from parameters and is none itself"]


class ReadsAnothersWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        weight = self.layer.weight
        return F.linear(x, weight), F.linear(x, weight[:32]), F.linear(x, torch.cat([weight, weight[32:]]))


def test_a_packed_layers_weight_is_no_attention_where_a_model_multiplies_it_itself():
    """As the absorbed projections of latent attention do. It would be quantised a second time, as attention."""
    recipe = {"recipe": "mxfp8", "attention_a": "mxfp8", "attention_b": "mxfp8"}
    model = ReadsAnothersWeight()
    fp4compile.pack_(model, recipe)
    packed = "weight of a packed layer, multiplied without calling the layer: it is dequantised"
    computed = "its weight is computed from parameters and is none itself"
    with torch.no_grad():
        report = fp4compile.explain(model, torch.randn(8, 64), recipe=recipe)
    assert [row.reason for row in report.rows] == [packed, packed, computed]


def test_a_bilinear_layer_is_named():
    with torch.no_grad():
        report = fp4compile.explain(torch.nn.Bilinear(64, 64, 32), *torch.randn(2, 4, 64), recipe="mxfp8")
    assert [row.reason for row in report.rows] == ["operator aten._trilinear.default"]


def test_a_product_that_the_recipe_leaves_has_that_reason():
    report = fp4compile.explain(torch.nn.Linear(64, 64), torch.randn(8, 64), recipe="nvfp4_weight_only")
    assert [(row.product, row.reason) for row in report.rows] == [
        ("fprop", None), ("wgrad", "recipe nvfp4_weight_only leaves wgrad in high precision"),
    ]  # fmt: skip


def test_a_device_without_kernels_is_left_alone():
    with FakeTensorMode():
        x, w = (torch.empty(rows, 64, device="mps") for rows in (8, 48))
        graph = make_fx(lambda x, w: x @ w.t())(x, w).graph
    recipe = named("mxfp8").replace(attention_a="mxfp8", attention_b="mxfp8")
    assert [decision.reason for decision in plan(find(graph, ()), recipe, ())] == ["device mps"]


def test_two_layers_that_share_input_and_shape_keep_their_names():
    class Twins(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Linear(64, 64, bias=bias) for bias in (True, False))

        def forward(self, x):
            return self.a(x).sin() + self.b(x).cos()

    report = fp4compile.explain(Twins(), torch.randn(8, 64, requires_grad=True), recipe="mxfp8")
    pairs = sorted((row.module, row.product) for row in report.rows)
    assert pairs == sorted((m, p) for m in "ab" for p in ("fprop", "dgrad", "wgrad"))


def modules(**layers):
    """A model of linear layers of these names ("head.proj" is nested), run in order; the last three share an input."""

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = list(layers)
            for name, layer in layers.items():
                *path, own = name.split("__")
                parent = self
                for part in path:
                    if not hasattr(parent, part):
                        parent.add_module(part, torch.nn.Module())
                    parent = getattr(parent, part)
                parent.add_module(own, layer)

        def forward(self, x):
            return [self.get_submodule(name.replace("__", "."))(x) for name in self.names]

    return Named()


def linear(out=64):
    return torch.nn.Linear(64, out)


HEADS = ("lm_head", "proj_out", "classifier", "score", "head", "decoder", "cls__predictions__decoder", "m__unembed")


@pytest.mark.parametrize("name", HEADS)
def test_output_heads_by_name_at_any_depth(name):
    model = modules(**{"up": linear(256), name: linear(), "down": linear(96)})
    assert quantised("mxfp8", model=model) == {"up", "down"}
    assert quantised({"recipe": "mxfp8", "rules": [("*" + name.split("__")[-1], "quantize")]}, model=model) == {
        "up", "down", name.replace("__", ".")
    }  # fmt: skip


class Flux(torch.nn.Module):
    """Blocks of which each ends in a `proj_out`, wider than the layer before it, and a head of that name."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q, self.proj_out = linear(), linear(96)

        def forward(self, x):
            return x + self.proj_out(self.to_q(x))[:, :64]

    def __init__(self):
        super().__init__()
        self.single_transformer_blocks = torch.nn.ModuleList(Flux.Block() for _ in range(2))
        self.proj_out = linear()

    def forward(self, x):
        for block in self.single_transformer_blocks:
            x = block(x)
        return self.proj_out(x)


IN_BLOCKS = {f"single_transformer_blocks.{index}.{name}" for index in (0, 1) for name in ("to_q", "proj_out")}


def test_no_layer_of_a_numbered_block_is_a_head():
    assert reasons("mxfp8", model=Flux()) == {**dict.fromkeys(IN_BLOCKS), "proj_out": "output head"}
    packed = fp4compile.pack_(Flux(), "mxfp8")
    assert {row.module for row in packed.quantised} == IN_BLOCKS


def test_nor_where_blocks_are_compiled_by_themselves(without_kernels):
    """As diffusers' `compile_repeated_blocks` does: rules see `proj_out`, and so does the choice of heads."""
    model, backend = Flux(), fp4compile.backend("mxfp8")
    for block in model.single_transformer_blocks:
        block.compile(backend=backend)
    with torch.no_grad():
        model(torch.randn(8, 64))
    assert [(row.name, row.reason) for row in backend.report.rows] == [("to_q", None), ("proj_out", None)]


def test_an_output_head_by_its_width():
    """The last layer is a head if it is wider than all others, is not applied in pieces and is in no numbered list."""
    model = modules(up=linear(128), down=linear(), vocabulary=linear(512))
    assert reasons("mxfp8", model=model) == {"up": None, "down": None, "vocabulary": "output head"}
    assert quantised({"recipe": "mxfp8", "skip_lm_head": False}, model=model) == {"up", "down", "vocabulary"}
    assert quantised("mxfp8", model=modules(up=linear(512), down=linear())) == {"up", "down"}
    assert quantised("mxfp8", model=torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(512))) == {"0", "2"}
    assert quantised("mxfp8", model=modules(gate=linear(512), up=linear(512))) == {"gate", "up"}
    assert quantised("mxfp8", model=modules(only=linear(512))) == {"only"}


def test_an_output_head_beside_packed_layers():
    """A packed layer counts as a layer, where the model is compiled and where it is packed again."""
    model = modules(up=linear(128), vocabulary=linear(512))
    fp4compile.pack_(model, "mxfp8")
    assert reasons("mxfp8", model=model) == {"up": None, "vocabulary": "output head"}
    assert [row.reason for row in fp4compile.pack_(model, "mxfp8").rows] == ["output head"]


def test_blocks_are_counted_with_those_that_are_packed():
    """Packed layers without a bias have no parameters."""
    model = torch.nn.Sequential()
    model.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    fp4compile.pack_(model, {"recipe": "mxfp8", "rules": [("layers.0", "skip"), ("layers.1", "skip")]})
    recipe = {"recipe": "mxfp8", "skip_last_blocks": 3}
    expected = {"layers.0": None, "layers.1": "block 1 is among the last 3"}
    assert reasons(recipe, model=model) == expected | {"layers.2": None, "layers.3": None}
    assert {row.module: row.reason for row in fp4compile.pack_(model, recipe).rows} == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_tied_to_the_embedding(dtype):
    """The embedding may look up a cast of its table."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = torch.nn.Embedding(96, 64), linear(256)
            self.to_words = torch.nn.Linear(64, 96, bias=False)
            self.to_words.weight = self.table.weight

        def forward(self, tokens):
            x = F.embedding(tokens, self.table.weight.to(dtype)).float()
            return self.layer(x), self.to_words(x)

    report = fp4compile.explain(Tied(), torch.arange(32), recipe="mxfp8")
    found = {(row.module, row.product): row.reason for row in report.rows}
    heads = {reason for (module, _), reason in found.items() if module != "layer"}
    assert heads == {"output head"} and len(found) == 6
    assert {reason for (module, _), reason in found.items() if module == "layer"} == {None}


def test_routers_by_name():
    """A `gate` beside experts is a router; a `gate` in a gated MLP is not."""
    model = modules(moe__gate=linear(), moe__experts__up=linear(), mlp__gate=linear(), moe__shared_expert_gate=linear(),
                    a__router=linear())  # fmt: skip
    assert quantised("mxfp8", model=model) == {"moe.experts.up", "mlp.gate"}
    assert reasons("mxfp8", model=model)["moe.gate"] == "router: its outputs choose among experts"


SELECTIONS = {
    "topk": lambda y: torch.topk(y, 2, dim=-1)[0],
    "softmax": lambda y: y.softmax(-1),
    "topk of sigmoids": lambda y: torch.topk(y.float().sigmoid() + 1.0, 2)[1],
    "sort": lambda y: torch.sort(y, dim=-1, descending=True)[0],
    "argmax": lambda y: y.argmax(-1),
    "maximum and its index": lambda y: torch.mul(*y.max(-1)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_routers_by_what_their_outputs_become(name):
    """A router is left alone forward and backward. The layer beside it feeds no selection over all its outputs."""

    class Choosing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.choose, self.plain = linear(48), linear(96)

        def forward(self, x):
            y = self.plain(x)
            no_choice = y.softmax(0).sum() + torch.topk(y[:, :48], 3)[0].sum() + y.max(-1)[0].sum() + y.argmax()
            return SELECTIONS[name](self.choose(x)).sum() + no_choice

    recipe = {"recipe": "mxfp8", "skip_lm_head": False}
    report = fp4compile.explain(Choosing(), torch.randn(8, 64, requires_grad=True), recipe=recipe)
    assert {row.reason for row in report.rows if row.module == "plain"} == {None}
    assert {row.reason for row in report.rows if row.module == "choose"} == {"router: its outputs choose among experts"}


def test_chosen_tokens_are_no_experts():
    """A layer whose largest outputs are taken over the tokens, as by max pooling, is no router."""
    model = torch.nn.Linear(64, 48)
    for pool in (lambda y: torch.topk(y, 4, dim=0)[0], lambda y: y.softmax(0)):
        report = fp4compile.explain(lambda x, pool=pool: pool(model(x)), torch.randn(32, 64), recipe="mxfp8")
        assert {row.reason for row in report.rows} == {None}


def test_features_are_no_experts():
    """A sparse autoencoder keeps the largest of thousands of features."""
    model = torch.nn.Linear(64, 2048)
    report = fp4compile.explain(lambda x: torch.topk(model(x), 4)[0].sum(), torch.randn(8, 64), recipe="mxfp8")
    assert {row.reason for row in report.rows} == {None}


def test_names():
    assert clean_name("L['self'].layers.0.mlp") == "layers.0.mlp"
    assert clean_name("_orig_mod.layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert module_name("layers.0.weight") == "layers.0"
    assert module_name("layers.0.w1") == "layers.0.w1"
    assert module_name("weight") == ""


class OwnGradient(torch.autograd.Function):
    """A matmul whose gradients are scaled, as of routers that estimate them: their roles cannot be proven."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return (2 * gradient) @ weight, (3 * gradient).t() @ x


class Own(torch.nn.Module):
    def __init__(self, outer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outer, 64))

    def forward(self, x):
        return OwnGradient.apply(x, self.weight)


@pytest.mark.parametrize("rule, reason", [((), "router: its outputs choose among experts"),
                                          (("router", "skip"), "rule 'router'"),
                                          (("router", "quantize"), None)])  # fmt: skip
def test_gradients_of_an_excluded_layer_have_its_reason_though_their_roles_are_unproven(rule, reason):
    class Routed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.other = Own(48), Own(64)

        def forward(self, x):
            x = self.other(x)
            return x * self.router(x).topk(2)[0].sum(-1, keepdim=True)

    rules = [rule] if rule else []
    x, recipe = torch.randn(32, 64, requires_grad=True), {"recipe": "mxfp8", "rules": rules}
    by_layer = {}
    for row in fp4compile.explain(Routed(), x, recipe=recipe).rows:
        by_layer.setdefault(row.module, {})[row.product] = row.reason
    unproven = "gradient x parameter that is not the input gradient of a layer"
    assert by_layer["router"]["fprop"] == reason and by_layer["router"]["other"] == (reason or unproven)
    assert by_layer["other"] == {"fprop": None, "wgrad": None, "other": unproven}
