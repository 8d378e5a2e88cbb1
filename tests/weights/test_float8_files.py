"""Checkpoints with FP8 weights, written by hand as their libraries do: read, multiplied, mixed with FP4, written."""

import json
import math
import re

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fp4compile
from fp4compile.cli.explain_command import _formats_of
from fp4compile.weights.experts import PackedExperts
from fp4compile.weights.linear import PackedLinear
from tests.helpers.checkpoints import bits, decoded, tensors_of

# No whole blocks of 128: the last block of a row and of a column is a part of one.
LLAMA = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 32}  # fmt: skip
TOKENS = torch.arange(16).view(2, 8)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def fresh_model(**changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **LLAMA | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def blocks_of(scales, shape, block):
    """Scales of blocks, one for each element."""
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def float8(weight, block, powers_of_two=False):
    """(codes, scales [blocks, blocks], meaning) of a weight."""
    grid = [math.ceil(size / step) for size, step in zip(weight.shape, block, strict=True)]
    scales = torch.rand(grid) / 448 + 1e-4
    scales = scales.log2().ceil().exp2() if powers_of_two else scales
    codes = (weight / blocks_of(scales, weight.shape, block)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * blocks_of(scales, weight.shape, block)


class Tensor:
    """One scale a tensor. `changes` are compressed-tensors' arguments."""

    formats, static = ("float8_tensor", "float8_tensor"), 0.25
    weights = {"strategy": "tensor"}
    activations = {"strategy": "tensor", "dynamic": False}
    modelopt = {"quant_algo": "FP8"}
    fp8 = {"weight_block_size": None, "activation_scheme": "static"}

    @staticmethod
    def tensors(weight, kind):
        codes, scales, meaning = float8(weight, weight.shape)
        named = {"fp8": ("weight_scale_inv", "activation_scale")}.get(kind, ("weight_scale", "input_scale"))
        lead = (1,) if kind == "compressed-tensors" else ()
        return {"weight": codes, named[0]: scales.reshape(lead), named[1]: torch.full(lead, 0.25)}, meaning


class Dynamic(Tensor):
    static = None
    activations = {"strategy": "tensor", "dynamic": True}
    fp8 = {"weight_block_size": None, "activation_scheme": "dynamic"}

    @staticmethod
    def tensors(weight, kind):
        found, meaning = Tensor.tensors(weight, kind)
        return {name: t for name, t in found.items() if name not in ("input_scale", "activation_scale")}, meaning


class Row:
    """One scale a row of the weight, and a token."""

    formats, static = ("float8_rowwise", "float8_rowwise"), None
    weights = {"strategy": "channel"}
    activations = {"strategy": "token", "dynamic": True}
    modelopt = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}

    @staticmethod
    def tensors(weight, kind):
        codes, scales, meaning = float8(weight, (1, weight.shape[1]))
        return {"weight": codes, "weight_scale": scales.flatten() if kind == "modelopt" else scales}, meaning


class Block:
    """One scale for 128x128 elements of the weight, and for 128 of a token."""

    formats, static = ("float8_1x128", "float8_128x128"), None
    weights = {"strategy": "block", "block_structure": [128, 128]}
    activations = {"strategy": "group", "group_size": 128, "dynamic": True}
    fp8 = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    powers_of_two = False

    @classmethod
    def tensors(cls, weight, kind):
        codes, scales, meaning = float8(weight, (128, 128), cls.powers_of_two)
        return {"weight": codes, "weight_scale_inv" if kind == "fp8" else "weight_scale": scales}, meaning


class PowersOfTwo(Block):
    """The same, with scales that are rounded up to powers of two."""

    formats, powers_of_two = ("e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"), True
    fp8 = Block.fp8 | {"scale_fmt": "ue8m0"}


class Squares(Block):
    """One E8M0 scale for 32x32 elements of the weight, and for 32 of a token, as DeepSeek-V4.1's."""

    formats, block = ("mxfp8", "mxfp8_32x32"), (32, 32)
    fp8 = {"weight_block_size": [32, 32], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}

    @classmethod
    def tensors(cls, weight, kind):
        codes, scales, meaning = float8(weight, cls.block, powers_of_two=True)
        scales = scales.to(torch.float8_e8m0fnu)
        return {"weight": codes, "weight_scale_inv": scales.view(torch.uint8) if kind == "mxfp8" else scales}, meaning


class Mxfp8(Squares):
    """One E8M0 scale, as a byte, for 32 elements of the weight, and of a token, as MiniMax-M3's."""

    formats, block = ("mxfp8", "mxfp8"), (1, 32)
    fp8 = Squares.fp8 | {"weight_block_size": [1, 32]}


class NVFP4:
    """FP4 weights without quantised activations."""

    formats, static = (None, "nvfp4"), None
    weights = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    activations = None
    modelopt = {"quant_algo": "W4A16_NVFP4", "group_size": 16}

    @staticmethod
    def tensors(weight, kind):
        codes = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8)
        scales = torch.rand(weight.shape[0], weight.shape[1] // 16).mul(448).to(torch.float8_e4m3fn)
        outer = torch.tensor(0.125) / 2688
        found = {"weight": codes, "weight_scale": scales, "weight_scale_2": outer}
        meaning = decoded({f"x.{name}": t for name, t in found.items()}, "x")
        if kind == "compressed-tensors":
            divisor = torch.tensor([2688 / 0.125])
            found = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
        return found, meaning


def config_of(library, kinds):
    """The quantization_config, for kinds by layer."""
    if library in ("fp8", "mxfp8"):
        (kind,) = set(kinds.values())
        return {"quant_method": library, "fmt": "e4m3", **kind.fp8}
    if library == "modelopt":
        if len(set(kinds.values())) > 1:
            layers = {layer: kind.modelopt for layer, kind in kinds.items()}
            return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        return {"quant_method": "modelopt", **next(iter(kinds.values())).modelopt}
    groups = {}
    for kind in dict.fromkeys(kinds.values()):
        shared = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        groups[kind.__name__] = {
            "targets": [layer for layer, one in kinds.items() if one is kind],
            "weights": shared | kind.weights,
            "input_activations": kind.activations and shared | kind.activations,
        }
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def written(folder, model, library, kinds):
    """Write a checkpoint by hand; returns its tensors, and what the codes of each layer mean."""
    tensors, meant = {}, {}
    for name, tensor in model.state_dict().items():
        kind = kinds.get(name.removesuffix(".weight"))
        if kind is None:
            tensors[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        found, meant[layer] = kind.tensors(tensor, library)
        tensors |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in found.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": config_of(library, kinds)}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, meant


def loaded(folder, **changes):
    model = fresh_model(**changes)
    fp4compile.load_packed(model, folder)
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


ONE = [("modelopt", Tensor), ("modelopt", Row), ("compressed-tensors", Tensor), ("compressed-tensors", Dynamic),
       ("compressed-tensors", Row), ("compressed-tensors", Block), ("fp8", Block), ("fp8", PowersOfTwo),
       ("fp8", Tensor), ("fp8", Dynamic), ("fp8", Squares), ("mxfp8", Mxfp8)]  # fmt: skip
MIXED = [("modelopt", NVFP4, Tensor), ("compressed-tensors", NVFP4, Block)]


@pytest.mark.parametrize(("library", "kind", "other"), [(*one, one[1]) for one in ONE] + MIXED)
def test_layers_multiply_by_what_a_file_means_and_it_is_written_again(tmp_path, library, kind, other):
    names = [name for name, module in fresh_model().named_modules() if isinstance(module, torch.nn.Linear)]
    kinds = {name: other if "down" in name else kind for name in names if name != "lm_head"}
    tensors, meant = written(tmp_path / "made", fresh_model(), library, kinds)
    model = loaded(tmp_path / "made")
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert packed.keys() == kinds.keys()
    for name, layer in packed.items():
        activation, weight = kinds[name].formats
        assert (layer.layer_format.activation, layer.layer_format.weight) == (activation, weight)
        assert layer.layer_format.activation_outer == kinds[name].static
        assert torch.equal(layer.weight, meant[name]), name
        x = torch.randn(5, layer.in_features)
        outer = None if kinds[name].static is None else torch.tensor(kinds[name].static)
        a = x if activation is None else fp4compile.quantize(x, activation, outer=outer).dequantize()[:, : x.shape[1]]
        a, w = a.double(), meant[name].double().T
        # Float32 sums in any order; either operand, a product and the scales of both are rounded, too.
        bound = (x.shape[1] + 5) * 2.0**-24 * (a.abs() @ w.abs())
        assert ((layer(x).double() - a @ w).abs() <= bound).all(), name
    fp4compile.export_packed(model, tmp_path / "again", library)
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors)
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))


class Twice(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_whose_class_multiplies_in_its_own_way_is_dequantised(tmp_path):
    _, meant = written(tmp_path / "made", fresh_model(), "fp8", {Q: Block, DOWN: Block})
    model = fresh_model()
    model.get_submodule(Q).__class__ = Twice
    with pytest.warns(UserWarning, match=f"1 quantised layers, such as '{Q}', are read in high precision.* as Twice"):
        fp4compile.load_packed(model, tmp_path / "made")
    assert type(model.get_submodule(Q)) is Twice and isinstance(model.get_submodule(DOWN), PackedLinear)
    assert torch.equal(model.get_submodule(Q).weight, meant[Q])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("load", ["load_packed", "from_pretrained"])
@pytest.mark.parametrize(("library", "kind"), [("fp8", Block), ("modelopt", NVFP4)])
def test_an_embedding_is_dequantised(tmp_path, library, kind, load, tied):
    """Qwen3.8-Flash-Next has a table in FP8."""
    name = "model.embed_tokens"
    tensors, meant = written(tmp_path / "made", fresh_model(tie_word_embeddings=tied), library, {Q: kind, name: kind})
    if tied:
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.warns(UserWarning, match=f"1 quantised layers, such as '{name}', are read in high .* as Embedding"):
        if load == "load_packed":
            model = loaded(tmp_path / "made", tie_word_embeddings=tied)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path / "made", dtype=torch.float32, quantization_config={"quant_method": "fp4compile"}
            )
    assert torch.equal(model.get_submodule(name).weight, meant[name])
    assert torch.equal(model.get_submodule(Q).weight, meant[Q])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_are_the_same_numbers(tmp_path, dtype):
    tensors, _ = written(tmp_path / "made", fresh_model(), "fp8", {Q: Block})
    tensors[f"{Q}.weight_scale_inv"] = tensors[f"{Q}.weight_scale_inv"].to(dtype)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    layer = loaded(tmp_path / "made").get_submodule(Q)
    scales = blocks_of(tensors[f"{Q}.weight_scale_inv"].float(), layer.weight.shape, (128, 128))
    assert torch.equal(layer.weight, tensors[f"{Q}.weight"].float() * scales)


def test_the_text_model_may_have_the_configuration_and_layers_their_own_frequencies(tmp_path):
    """As Kimi's checkpoints have both."""
    tensors, meant = written(tmp_path / "made", fresh_model(), "compressed-tensors", {Q: Row})
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config["text_config"] = {"quantization_config": config.pop("quantization_config")}
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    assert _formats_of(tmp_path / "made") == ["float8_rowwise weights, float8_rowwise activations"]
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(48)}
    save_file(tensors | frequencies, tmp_path / "made" / "model.safetensors")
    with pytest.warns(UserWarning, match="such as 'model.layers.0.self_attn.rotary_emb.inv_freq', are not used"):
        model = loaded(tmp_path / "made")
    assert torch.equal(model.get_submodule(Q).weight, meant[Q])


@pytest.mark.parametrize("library", ["mxfp8", "fp8"])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
def test_mx_scales_have_several_names_and_dtypes(tmp_path, library, name):
    """A configuration of "mxfp8" may say nothing else, as vLLM takes it."""
    tensors, meant = written(tmp_path / "made", fresh_model(), library, {Q: Mxfp8})
    tensors[f"{Q}.{name}"] = tensors.pop(f"{Q}.weight_scale_inv").view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    if library == "mxfp8":
        config = json.loads((tmp_path / "made" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"], "scale_fmt": None}
        (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    assert _formats_of(tmp_path / "made") == ["mxfp8 weights, mxfp8 activations"]
    assert torch.equal(loaded(tmp_path / "made").get_submodule(Q).weight, meant[Q])


def test_autofp8_names_its_scales_as_vllm_does(tmp_path):
    tensors, meant = written(tmp_path / "made", fresh_model(), "fp8", {Q: Tensor})
    for own, name in (("weight_scale_inv", "weight_scale"), ("activation_scale", "input_scale")):
        tensors[f"{Q}.{name}"] = tensors.pop(f"{Q}.{own}")
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    layer = loaded(tmp_path / "made").get_submodule(Q)
    assert torch.equal(layer.weight, meant[Q])
    assert layer.layer_format.activation_outer == 0.25


def test_layers_of_one_file_may_name_their_scales_either_way(tmp_path):
    tensors, meant = written(tmp_path / "made", fresh_model(), "fp8", {Q: Block, DOWN: Block})
    tensors[f"{DOWN}.weight_scale"] = tensors.pop(f"{DOWN}.weight_scale_inv")
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    model = loaded(tmp_path / "made")
    for name, meaning in meant.items():
        assert torch.equal(model.get_submodule(name).weight, meaning), name
    save_file(tensors | {f"{Q}.weight_scale": torch.ones(2, 2)}, tmp_path / "made" / "model.safetensors")
    with pytest.raises(ValueError, match=f"the model has no '{Q}.weight_scale'"):
        loaded(tmp_path / "made")


@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PB_WO"])
def test_deepseeks_layers_in_a_mixed_checkpoint_of_modelopt(tmp_path, algorithm):
    """As NVIDIA publishes them: left as they were, with scales in bfloat16. Its two configurations name them so."""
    kind = type("Mixed", (Block,), {"modelopt": {"quant_algo": algorithm, "group_size": 128}})
    tensors, meant = written(tmp_path / "made", fresh_model(), "modelopt", {Q: kind, DOWN: NVFP4})
    scales = tensors.pop(f"{Q}.weight_scale").bfloat16()
    meant[Q] = tensors[f"{Q}.weight"].float() * blocks_of(scales.float(), meant[Q].shape, (128, 128))
    save_file(tensors | {f"{Q}.weight_scale_inv": scales}, tmp_path / "made" / "model.safetensors")
    model = loaded(tmp_path / "made")
    for name, meaning in meant.items():
        assert torch.equal(model.get_submodule(name).weight, meaning), name
    activation = "float8_1x128" if algorithm == "FP8_BLOCK_SCALES" else None
    assert model.get_submodule(Q).layer_format.activation == activation
    expected = "activations as they come" if activation is None else "float8_1x128 activations"
    assert f"float8_128x128 weights, {expected}" in _formats_of(tmp_path / "made")


def test_minimax_layers_in_a_mixed_checkpoint_of_modelopt(tmp_path):
    """As NVIDIA publishes MiniMax-M3: MXFP8 as it was, and experts in NVFP4."""
    kind = type("Mixed", (Mxfp8,), {"modelopt": {"quant_algo": "MXFP8"}})
    _, meant = written(tmp_path / "made", fresh_model(), "modelopt", {Q: kind, DOWN: NVFP4})
    model = loaded(tmp_path / "made")
    for name, meaning in meant.items():
        assert torch.equal(model.get_submodule(name).weight, meaning), name
    assert model.get_submodule(Q).layer_format.activation == "mxfp8"


@pytest.mark.parametrize("kind", [Tensor, Row, Block])
def test_reciprocals_of_scales_are_refused(tmp_path, kind):
    library, name = ("fp8", "weight_scale_inv") if kind is Block else ("modelopt", "weight_scale")
    tensors, _ = written(tmp_path / "made", fresh_model(), library, {Q: kind})
    tensors[f"{Q}.{name}"] = 1 / tensors[f"{Q}.{name}"]
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{Q}.{name}': has .* it looks like the reciprocal of a scale"):
        loaded(tmp_path / "made")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"), f"{Q}.weight_scale_inv' is missing"),
        (lambda tensors: tensors[f"{Q}.weight_scale_inv"].fill_(float("nan")), "has scales that are NaN"),
        (lambda tensors: tensors[f"{Q}.weight_scale_inv"].fill_(float("inf")), "has scales that are"),
        (lambda tensors: tensors.update({f"{Q}.weight_scale_inv": torch.ones(3, 2)}), "expected float32 or 16-bit"),
        (lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(192, 192)}), "expected torch.float8_e4m3fn"),
        (
            lambda tensors: tensors.update({f"{DOWN}.weight": tensors[f"{DOWN}.weight"].half()}),
            r"is torch.float16 \(192, 320\), the model needs .*: make the model in torch.float16",
        ),
    ],
)
def test_broken_tensors_are_refused(tmp_path, change, message):
    tensors, _ = written(tmp_path / "made", fresh_model(), "fp8", {Q: Block})
    change(tensors)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / "made")


@pytest.mark.parametrize(("location", "known"), [("weight_input", True), ("input", False)])
def test_transforms_of_activations_are_refused(tmp_path, location, known):
    written(tmp_path / "made", fresh_model(), "compressed-tensors", {Q: Row})
    file = tmp_path / "made" / "config.json"
    config = json.loads(file.read_text())
    apply = [{"targets": ["Linear"], "location": location, "inverse": True}]
    config["quantization_config"]["transform_config"] = {"config_groups": {"u": {"type": "hadamard", "apply": apply}}}
    file.write_text(json.dumps(config))
    if known:
        loaded(tmp_path / "made")
    else:
        with pytest.raises(ValueError, match=r"transform_config: 'u' transforms activations \(location 'input'\)"):
            loaded(tmp_path / "made")


def test_scales_that_are_no_powers_of_two_are_refused_where_they_should_be(tmp_path):
    tensors, _ = written(tmp_path / "made", fresh_model(), "fp8", {Q: PowersOfTwo})
    tensors[f"{Q}.weight_scale_inv"][1, 0] = 0.75
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{Q}.weight_scale_inv': expected powers of two, .*'ue8m0'; got 0.75"):
        loaded(tmp_path / "made")


@pytest.mark.parametrize(
    ("library", "change", "message"),
    [
        (
            "fp8",
            {"weight_block_size": [64, 128]},
            r"weight_block_size: expected \[128, 128\], \[1, 32\], \[32, 32\] or null",
        ),
        ("fp8", {"weight_block_size": [32, 32]}, "scale_fmt: expected 'ue8m0', got 'float'"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme: expected 'dynamic', got 'static'"),
        ("fp8", {"expert_dtype": "int4"}, "expert_dtype: expected 'fp8' or 'fp4', got 'int4'"),
        ("fp8", {"fmt": "e5m2"}, "fmt: expected 'e4m3'"),
        ("fp8", {"moe_quant_algo": "INT4"}, "moe_quant_algo: expected 'MXFP4' or 'NVFP4', got 'INT4'"),
        ("compressed-tensors", {"block_structure": [64, 64]}, "expected symmetric floats of"),
    ],
)
def test_other_configurations_are_refused(tmp_path, library, change, message):
    written(tmp_path / "made", fresh_model(), library, {Q: Block})
    file = tmp_path / "made" / "config.json"
    config = json.loads(file.read_text())
    described = config["quantization_config"]
    (described if library == "fp8" else described["config_groups"]["Block"]["weights"]).update(change)
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / "made")


@pytest.mark.parametrize(
    ("library", "kinds", "texts"),
    [
        ("fp8", {Q: Block}, ["float8_128x128 weights, float8_1x128 activations"]),
        (
            "modelopt",
            {Q: NVFP4, DOWN: Tensor},
            [
                "nvfp4 weights, activations as they come",
                "float8_tensor weights, float8_tensor activations with a static scale",
            ],
        ),
        ("compressed-tensors", {Q: Row, DOWN: Row}, ["float8_rowwise weights, float8_rowwise activations"]),
    ],
)
def test_explain_says_in_which_formats_a_checkpoint_is(tmp_path, library, kinds, texts):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config_of(library, kinds)}))
    assert _formats_of(tmp_path) == _formats_of(tmp_path / "config.json") == texts


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({}, []),
        ({"quantization_config": {"quant_method": "gptq"}}, ["not known to load_packed: .*known are modelopt"]),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ["mxfp4 weights of experts"]),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W8A16"}}, ["unknown quant_algo 'W8A16'"]),
    ],
)
def test_explain_says_where_a_checkpoint_cannot_be_read(tmp_path, config, texts):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = _formats_of(tmp_path)
    assert len(found) == len(texts)
    assert all(re.search(pattern, text) for pattern, text in zip(texts, found, strict=True))


# ---------------------------------------------------------------- experts

MIXTRAL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 1, "vocab_size": 32, "num_local_experts": 3}  # fmt: skip
FILE = "model.layers.0.block_sparse_moe.experts"
MODEL = "model.layers.0.mlp.experts"


def experts_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **MIXTRAL), dtype=torch.float32).eval()


knows_mxfp8 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.12.0"),
    reason="from_pretrained of transformers 5.8.0 to 5.11.0 (seven were tried) does not know the quant_method mxfp8",
)


@pytest.mark.parametrize(
    ("recipe", "layout"), [pytest.param("mxfp8", "mxfp8", marks=knows_mxfp8), ("mxfp8_32x32", "fp8")]
)
def test_transformers_reads_mx_blocks_that_were_written_as_the_same_weights(recipe, layout, tmp_path):
    """On a CPU it dequantises them."""
    model = experts_model()
    fp4compile.pack_(model, {"recipe": recipe, "min_m": 1})
    fp4compile.export_packed(model, tmp_path / "made", layout)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).state_dict()
    order = {"quant_method": "fp4compile"}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "made", quantization_config=order)
    assert isinstance(ours.get_submodule(f"{MODEL}.gate_up_proj_packed"), PackedExperts)
    wanted = model.dequantize().state_dict()
    for found in (theirs, ours.dequantize().state_dict()):
        assert found.keys() == wanted.keys()
        assert [name for name, one in wanted.items() if not torch.equal(found[name], one)] == []


def experts_file(folder, library, kind, same_scales=True):
    """A checkpoint with experts one by one; returns what they mean: gate and up, down."""
    model, tensors, meant = experts_model(), {}, []
    for name, tensor in model.state_dict().items():
        if not name.startswith(MODEL):
            tensors[name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")] = tensor
    for expert in range(3):
        for leaf, shape in (("w1", (256, 128)), ("w3", (256, 128)), ("w2", (128, 256))):
            torch.manual_seed(100 * expert + (leaf == "w2") if same_scales else 10 * expert + int(leaf[1]))
            found, meaning = kind.tensors(torch.randn(shape) / 8, library)
            meant.append(meaning)
            tensors |= {f"{FILE}.{expert}.{leaf}.{suffix}": part.contiguous() for suffix, part in found.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    names = {name.rpartition(".")[0]: kind for name in tensors if name.startswith(FILE)}
    config = model.config.to_dict() | {"quantization_config": config_of(library, names)}
    (folder / "config.json").write_text(json.dumps(config))
    each = [torch.cat(meant[3 * expert : 3 * expert + 2]) for expert in range(3)]
    return tensors, torch.stack(each), torch.stack(meant[2::3])


@pytest.mark.parametrize(("library", "kind"), [("modelopt", Tensor), ("compressed-tensors", Row), ("fp8", Block)])
def test_experts_one_by_one_are_combined_and_written_again(tmp_path, library, kind):
    tensors, gate_up, down = experts_file(tmp_path / "made", library, kind)
    model = experts_model()
    fp4compile.load_packed(model, tmp_path / "made")
    found = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert [torch.equal(one(), meant) for one, meant in zip(found, (gate_up, down), strict=True)] == [True, True]
    assert logits(model).isfinite().all()
    fp4compile.export_packed(model, tmp_path / "again", library)
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors)


def test_gate_and_up_with_different_scales_become_rows(tmp_path):
    _, gate_up, _ = experts_file(tmp_path / "made", "modelopt", Tensor, same_scales=False)
    model = experts_model()
    fp4compile.load_packed(model, tmp_path / "made")
    found = model.get_submodule(f"{MODEL}.gate_up_proj_packed")
    assert found.layer_format.weight == "float8_rowwise"
    assert torch.equal(found(), gate_up)


def test_experts_in_one_tensor_are_read(tmp_path):
    tensors, gate_up, down = experts_file(tmp_path / "made", "fp8", Block)
    parts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(FILE)}
    for child, leaves in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
        for suffix, own in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            each = [torch.cat([parts[f"{FILE}.{expert}.{leaf}.{suffix}"].view(torch.uint8) for leaf in leaves])
                    for expert in range(3)]  # fmt: skip
            dtype = parts[f"{FILE}.0.w1.{suffix}"].dtype
            tensors[f"{MODEL}.{child}{own}"] = torch.stack(each).view(dtype)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    model = experts_model()
    fp4compile.load_packed(model, tmp_path / "made")
    assert torch.equal(model.get_submodule(f"{MODEL}.gate_up_proj_packed")(), gate_up)
    assert torch.equal(model.get_submodule(f"{MODEL}.down_proj_packed")(), down)


# ---------------------------------------------------------------- one scale for layers that engines fuse


def unlike_model():
    model = fresh_model()
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.k_proj").weight.div_(4)
    return model


def test_a_reader_with_one_scale_would_lose_what_the_warning_says(tmp_path):
    model = unlike_model()
    fp4compile.pack_(model, "nvfp4_weight_only", progress=False)
    with pytest.warns(UserWarning, match=r"k_proj' falls to -\d+\.\d dB at most. pack_\(shared_scales=True\)") as found:
        fp4compile.export_packed(model, tmp_path / "made")
    said = float(str(found[0].message).split(" dB at most")[0].rpartition(" ")[2])
    q, k, v = (model.get_submodule(f"model.layers.0.self_attn.{leaf}_proj") for leaf in "qkv")
    largest = max(one.weight_outer for one in (q, k, v))
    wrong = k.weight * (largest / k.weight_outer)
    weight = unlike_model().get_submodule("model.layers.0.self_attn.k_proj").weight.detach()
    sqnr = 10 * torch.log10(weight.square().sum() / (weight - wrong).square().sum()).item()
    assert said == pytest.approx(sqnr, abs=0.3)


@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", {"fprop_w": "float8_tensor"}, "nvfp4_static"])
def test_shared_scales_are_those_of_the_largest_member(tmp_path, recipe, recwarn):
    model, alone = unlike_model(), unlike_model()
    if recipe == "nvfp4_static":
        recipe = fp4compile.calibrate(model, [TOKENS], recipe="nvfp4_static")
    fp4compile.pack_(alone, recipe, progress=False)
    fp4compile.pack_(model, recipe, shared_scales=True, progress=False)
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        members = [model.get_submodule(f"model.layers.0.{name}") for name in group]
        own = [alone.get_submodule(f"model.layers.0.{name}") for name in group]
        assert {one.weight_outer.item() for one in members} == {max(one.weight_outer.item() for one in own)}
        static = [one.layer_format.activation_outer for one in own]
        assert {one.layer_format.activation_outer for one in members} == {None if None in static else max(static)}
    down = (one.get_submodule(DOWN) for one in (model, alone))
    assert torch.equal(*(one.weight_data for one in down))
    if recipe != {"fprop_w": "float8_tensor"}:
        recwarn.clear()
        fp4compile.export_packed(model, tmp_path / "made")
        assert not [one for one in recwarn if "global scales" in str(one.message)]


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize(("library", "kind"), [("modelopt", Tensor), ("fp8", Block), ("compressed-tensors", Row)])
def test_from_pretrained_reads_published_folders_packed(tmp_path, library, kind, recwarn):
    names = [name for name, module in fresh_model().named_modules() if isinstance(module, torch.nn.Linear)]
    written(tmp_path / "made", fresh_model(), library, {name: kind for name in names if name != "lm_head"})
    fp4compile.register_with_transformers()
    recwarn.clear()
    # ModelOpt's checkpoints have no other reader in transformers.
    order = {} if library == "modelopt" else {"quantization_config": {"quant_method": "fp4compile"}}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32, **order).eval()
    assert not [one for one in recwarn if "transformers" in one.filename]
    expected = loaded(tmp_path / "made")
    assert bits({n: t for n, t in model.state_dict().items() if "extra_state" not in n}) == bits(
        {n: t for n, t in expected.state_dict().items() if "extra_state" not in n}
    )
    assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))


def test_from_pretrained_refuses_tensors_of_a_packed_layer_that_it_does_not_know(tmp_path):
    tensors, _ = written(tmp_path / "made", fresh_model(), "modelopt", {Q: Tensor})
    save_file(tensors | {f"{Q}.pre_quant_scale": torch.ones(192)}, tmp_path / "made" / "model.safetensors")
    fp4compile.register_with_transformers()
    with pytest.raises(ValueError, match=f"made: the model has no '{Q}.pre_quant_scale'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)


def test_from_pretrained_reads_published_experts_packed(tmp_path):
    _, gate_up, _ = experts_file(tmp_path / "made", "fp8", Block)
    fp4compile.register_with_transformers()
    order = {"quant_method": "fp4compile"}
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "made", quantization_config=order, output_loading_info=True
    )
    assert torch.equal(model.get_submodule(f"{MODEL}.gate_up_proj_packed")(), gate_up)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert logits(model).isfinite().all()
