"""`python -m fp4compile explain`: models from configurations of transformers and from functions, on the meta device."""

import json
import textwrap

import pytest
import torch

import fp4compile
from fp4compile.cli.main import main

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}


def llama(**sizes):
    sizes = SMALL | {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2} | sizes
    return transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)


CONFIGS = {
    "llama": (llama, 7),
    "without an architecture": (lambda: transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=512), 4),
    "experts": (lambda: transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, num_key_value_heads=2,
        head_dim=32, architectures=["Qwen3MoeForCausalLM"], **SMALL), 6),
    "encoder-decoder": (lambda: transformers.T5Config(
        vocab_size=512, d_model=64, d_ff=128, d_kv=32, num_layers=1, num_heads=2,
        architectures=["T5ForConditionalGeneration"]), 16),
    "vision": (lambda: transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8,
        architectures=["ViTForImageClassification"]), 6),
}  # fmt: skip


def printed(capsys, *arguments):
    main(["explain", *map(str, arguments)])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_enough(name, tmp_path, capsys):
    make, quantised = CONFIGS[name]
    make().save_pretrained(tmp_path)
    found = json.loads(printed(capsys, tmp_path, "--recipe", "mxfp8", "--tokens", 48, "--gpu", "H200", "--json"))
    assert (found["recipe"], found["gpu"], found["quantised"]) == ("mxfp8", "H200", quantised)
    assert {row["m"] for row in found["rows"] if row["category"] == "dense"} == {17 if name == "vision" else 48} | (
        {1} if name == "vision" else set()
    )
    left = {row["right"] for row in found["rows"] if row["reason"] and row["category"] == "dense"}
    assert left == {"bfloat16"}, "the head has the dtype in which models run"


def test_a_file_is_reported_as_text_and_as_a_page(tmp_path, capsys):
    llama(num_hidden_layers=2).save_pretrained(tmp_path)
    page = tmp_path / "report.html"
    out = printed(capsys, tmp_path / "config.json", "--html", page)
    assert (
        out.startswith("fp4compile, recipe nvfp4") and "model.layers.*.mlp.up_proj x2" in out and "of 17 matmuls" in out
    )
    assert "up_proj" in page.read_text() and " 4096 " in out, "the default length"


FACTORIES = """
    import torch
    def model(): return torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 96))
    def single(): return torch.nn.Linear(64, 64), torch.empty(3, 64)
    def several(): return torch.nn.functional.linear, (torch.empty(3, 64), torch.empty(32, 64))
    def named(): return torch.nn.Linear(64, 64), {"input": torch.empty(5, 64)}
    def nothing(): return 3
    MODEL = torch.nn.Linear(64, 64)
"""


@pytest.mark.parametrize("function, rows", [("model", {48}), ("single", {3}), ("several", {3}), ("named", {5})])
def test_a_function_gives_a_model_and_its_arguments(function, rows, tmp_path, monkeypatch, capsys):
    (tmp_path / "factories.py").write_text(FACTORIES.replace("\n    ", "\n"))
    monkeypatch.syspath_prepend(tmp_path)
    found = json.loads(printed(capsys, f"factories:{function}", "--tokens", 48, "--json"))
    assert rows <= {row["m"] for row in found["rows"]}


@pytest.mark.parametrize("arguments, message", [
    (["absent"], "there is no file 'absent'"),
    (["absent.module:make"], "'absent.module:make': No module named 'absent'"),
    (["json:absent"], "'json:absent': module 'json' has no attribute 'absent'"),
    (["factories:nothing"], "'factories:nothing': expected a model, got int"), (["folder"], "folder: "),
    (["json:__name__"], "'json:__name__': expected a function that returns a model, got an object of str"),
    (["factories:MODEL"], "'factories:MODEL': expected a function that returns a model, got an object of Linear"),
    (["json:dumps"], "'json:dumps': expected a function without arguments: missing a required argument: 'obj'"),
    (["speech"], "WhisperModel takes 'input_features', whose size is unknown here: give a function"),
    (["pairs"], "CLIPModel takes texts and images, whose size is unknown here: give a function"),
    (["folder", "--gpu", "b20"], "unknown GPU 'b20'. Did you mean 'B200'?"),
    (["folder", "--recipe", "nvfp5"], "unknown recipe 'nvfp5'"),
    (["folder", "--tokens", "0"], "expected a positive whole number"),
    (["folder", "--html", "absent/page.html"], "expected a file in a folder that exists, got 'absent/page.html'"),
    (["folder", "--html", "folder"], "expected a file in a folder that exists, got 'folder'"),
])  # fmt: skip
def test_bad_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "factories.py").write_text(FACTORIES.replace("\n    ", "\n"))
    (tmp_path / "folder").mkdir()
    transformers.WhisperConfig(encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path / "speech")
    one = {"num_hidden_layers": 1}
    transformers.CLIPConfig(text_config=one, vision_config=one).save_pretrained(tmp_path / "pairs")
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *arguments])
    assert message in capsys.readouterr().err


def test_the_cache_of_transformers_is_off_on_the_meta_device():
    """Its default is on, and Dynamo cannot capture it there. The configuration is as before afterwards."""
    with torch.device("meta"):
        model, tokens = transformers.LlamaForCausalLM(llama()), torch.zeros(1, 48, dtype=torch.long)
    with torch.no_grad():
        report = fp4compile.explain(model, tokens, recipe="mxfp8", gpu="B200")
    assert len(report.quantised) == 7 and model.config.use_cache is True


def test_a_training_step(tmp_path, capsys):
    llama().save_pretrained(tmp_path)
    command = (tmp_path, "--recipe", "mxfp8", "--tokens", 48, "--gpu", "B200", "--json", "--train")
    found = json.loads(printed(capsys, *command))
    products = [row["product"] for row in found["rows"] if row["category"] == "dense"]
    assert [products.count(name) for name in ("fprop", "dgrad", "wgrad")] == [8, 8, 8] and found["quantised"] == 21
    assert all(row["seconds"] > 0 for row in found["rows"]) and found["rest"]["seconds"] > 0


IN_TRAINING = """
    import torch
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.auxiliary = torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)
        def forward(self, x):
            y = self.layer(x)
            return (y, self.auxiliary(y)) if self.training else y
    def model(): return Model().eval(), torch.empty(48, 64)
"""


def test_a_training_step_runs_what_a_model_does_in_training_alone(tmp_path, monkeypatch, capsys):
    """Such as the auxiliary head of this model, which is not in evaluation mode then."""
    (tmp_path / "in_training.py").write_text(textwrap.dedent(IN_TRAINING))
    monkeypatch.syspath_prepend(tmp_path)
    for train, layers in (([], {"layer"}), (["--train"], {"layer", "auxiliary"})):
        found = json.loads(printed(capsys, "in_training:model", "--recipe", "mxfp8", "--json", *train))
        assert {row["module"] for row in found["rows"]} == layers
