"""Codes by sample inputs in files: linear layers in every format, and experts, come back with equal bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4compile
from fp4compile import Recipe
from fp4compile.formats import formats
from fp4compile.weights import gptq
from fp4compile.weights.buffers import packed_in
from fp4compile.weights.experts import PackedExperts
from tests.helpers.packed_models import same_codes

SMALL = {"min_m": 1, "min_n": 1, "min_k": 1}


def unlike_rounding(model, plain, recipe):
    """The names of the packed weights whose codes differ from codes that are rounded to nearest."""
    fp4compile.pack_(plain, recipe.replace(weight_method="nearest", weight_scales="amax"), progress=False)
    near = packed_in(plain)
    return {name for name, one in packed_in(model).items() if not torch.equal(one.weight_data, near[name].weight_data)}


def assert_comes_back(model, plain, folder, layouts):
    """A packed model, saved by `save_packed` and exported in each layout, has equal bits in an unpacked model again."""
    fp4compile.save_packed(model, folder / "packed")
    for layout in layouts:
        fp4compile.export_packed(model, folder / layout, layout)
    for name in ("packed", *layouts):
        fp4compile.load_packed(fresh := copy.deepcopy(plain), folder / name)
        assert same_codes(fresh, model), name


# ---------------------------------------------------------------- linear layers

MODELOPT = ("nvfp4_weight_only", "mxfp8", "mxfp4", "float8_rowwise")
COMPRESSED = (*MODELOPT, "float8_tensor", "float8_block")
EVERY = (*COMPRESSED, "nvfp4_one_level", "nvfp4_rowwise", "mxfp8_32x32", "mxfp8_floor")


class Chain(nn.Module):
    """A layer for each of some recipes; the in features fill no block of 128, 64 or 32."""

    def __init__(self, recipes):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(80, 80) for name in recipes})

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x)) + x
        return x


@torch.no_grad()
@pytest.mark.parametrize(("recipes", "layout"), [
    (EVERY, None), (MODELOPT, "modelopt"), (COMPRESSED, "compressed-tensors"), (("float8_block",), "fp8"),
])  # fmt: skip
def test_linear_layers_of_every_format(recipes, layout, tmp_path):
    torch.manual_seed(3)
    plain = Chain(recipes)
    recipe = Recipe(fprop_w="nvfp4", weight_scales="mse", weight_method="gptq",
                    rules=[(f"layers.{name}", name) for name in recipes], **SMALL)  # fmt: skip
    model = copy.deepcopy(plain)
    report = fp4compile.pack_(model, recipe, batches=[torch.randn(200, 80).cumsum(1) / 4], progress=False)
    assert [row.module for row in report.rows] == [f"layers.{name}" for name in recipes]
    assert all(row.weight_scales.endswith(", gptq") for row in report.rows)
    assert_comes_back(model, plain, tmp_path, [layout] if layout else [])
    assert unlike_rounding(model, plain, recipe) == {f"layers.{name}" for name in recipes}


# ---------------------------------------------------------------- experts in one parameter

CONFIG = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 1,
          "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 3,
          "num_local_experts": 3, "num_experts_per_tok": 2, "initializer_range": 0.2}  # fmt: skip
GPTQ = {"fprop_w": "nvfp4", "weight_scales": "mse", "weight_method": "gptq"}
EXPERTS_ALONE = GPTQ | {"fprop_w": "mxfp4", "rules": [("*attn*", "skip")]}
MIXED = GPTQ | {
    "rules": [("*0.mlp.*gate_up_proj", "mxfp4"), ("*0.mlp.*down_proj", "mxfp8"),
              ("*1.mlp.*gate_up_proj", "float8_rowwise"), ("*1.mlp.*down_proj", "nvfp4_weight_only")],
}  # fmt: skip


def model_of(kind, layers):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIG | {"num_hidden_layers": layers})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


BOTH_WAYS = ("modelopt", "compressed-tensors")


@torch.no_grad()
@pytest.mark.parametrize(("kind", "recipe", "layers", "layouts"), [
    ("mixtral", GPTQ, 1, BOTH_WAYS), ("qwen3_moe", MIXED, 2, BOTH_WAYS), ("gpt_oss", GPTQ, 1, ()),
    ("gpt_oss", EXPERTS_ALONE, 1, ["mxfp4"]),
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*groups of layers .* have different global scales")
def test_experts_of_published_models(kind, recipe, layers, layouts, tmp_path):
    plain, recipe = model_of(kind, layers), Recipe(**recipe, **SMALL)
    model, batch = copy.deepcopy(plain), {"input_ids": torch.arange(192).view(4, 48) % 64}
    report = fp4compile.pack_(model, recipe, batches=[batch], progress=False)
    experts = {name for name, one in packed_in(model).items() if isinstance(one, PackedExperts)}
    assert len(experts) == 2 * layers
    assert {row.note for row in report.rows} == {None}
    assert_comes_back(model, plain, tmp_path, layouts)
    if not layouts:
        with pytest.raises(ValueError, match=r"gate_up_proj_packed' has its weight as \[in, out\]"):
            fp4compile.export_packed(model, tmp_path / "no")
    assert experts <= unlike_rounding(model, plain, recipe)


# ---------------------------------------------------------------- experts as layers


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
        self.down_proj = nn.Linear(48, 64, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Routed(nn.Module):
    """Experts as modules, which a loop calls with their tokens; the last one gets none."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4, bias=False), nn.ModuleList(Expert() for _ in range(4))
        self.gate.weight.data[3] = -1.0

    def chosen(self, x):
        return self.gate(x).softmax(-1).topk(2, -1)

    def forward(self, x):
        shares, indices = self.chosen(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(indices == i)
            out.index_add_(0, rows, expert(x[rows]) * shares[rows, place, None])
        return out


@torch.no_grad()
def test_experts_as_layers(tmp_path):
    torch.manual_seed(2)
    plain, recipe = Routed(), Recipe(**GPTQ, **SMALL)
    model, batches = copy.deepcopy(plain), [torch.randn(60, 64) + 1 for _ in range(2)]
    with pytest.warns(UserWarning, match=r"reached 3 weights, such as 'experts\.3\.gate_proj'; they are rounded"):
        report = fp4compile.pack_(model, recipe, batches=batches, progress=False)
    few = {row.module for row in report.rows if row.note == "rounded to nearest, for lack of tokens: the layer"}
    assert few == {f"experts.3.{leaf}_proj" for leaf in ("gate", "up", "down")}
    for i, expert in enumerate(plain.experts):
        own = torch.cat([x[(plain.chosen(x)[1] == i).any(-1)] for x in batches])
        known = gptq.Moments((own.T @ own)[None], [len(own)])
        codes, scales, outer = gptq.quantize(expert.up_proj.weight[None], known, formats.get("nvfp4"), "mse")
        found = model.experts[i].up_proj
        assert torch.equal(found.weight_data, codes[0]) and torch.equal(found.weight_outer, outer[0])
        assert torch.equal(found.weight_scales, scales[0].view(torch.uint8))
    fp4compile.save_packed(model, tmp_path / "packed")
    with pytest.warns(UserWarning, match="4 groups of layers .* have different global scales"):
        fp4compile.export_packed(model, tmp_path / "exported")
    for name in ("packed", "exported"):
        fp4compile.load_packed(fresh := copy.deepcopy(plain), tmp_path / name)
        assert same_codes(fresh, model)
