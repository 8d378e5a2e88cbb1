"""The example scripts, run as a user runs them, at small size."""

import json
import math
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

import fp4compile
from fp4compile.weights.buffers import packed_in
from tests.helpers import without_codegen
from tests.helpers.programs import Program

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def main_of(script):
    return runpy.run_path(str(EXAMPLES / script))["main"]


def train(*options):
    """The losses of the argparse example on a small block, or as many as the options say."""
    small = ["--steps", "10", "--width", "64", "--blocks", "1", "--device", "cpu"]
    return main_of("train_argparse.py")([*small, *options])


def summary(capsys):
    return re.search(r"recipe (\w+): (\d+) of (\d+) matmuls quantised", capsys.readouterr().out).groups()


def test_argparse_script_follows_the_unquantised_run(capsys, monkeypatch):
    without_codegen.install(monkeypatch)  # what Inductor makes of it, a Llama and the other script show
    with torch.compiler.set_stance("force_eager"):
        plain = train()
    losses = train("--fp4compile-recipe", "nvfp4_train")
    # Four linear layers, three products each, and as many of the LM head; the rest is attention's.
    assert summary(capsys)[:2] == ("nvfp4_train", str(4 * 3))
    assert losses != plain and losses == pytest.approx(plain, abs=0.1)
    assert losses[-1] < losses[0] - 1


def test_argparse_options(capsys, monkeypatch):
    without_codegen.install(monkeypatch)  # what is quantised is known before
    options = ["--fp4compile-skip-last", "1", "--fp4compile-skip", "*linear2"]
    train("--steps", "1", "--blocks", "2", "--fp4compile-recipe", "mxfp8", *options)
    assert summary(capsys)[:2] == ("mxfp8", str(3 * 3))
    train("--steps", "1", "--blocks", "2", "--fp4compile-recipe", str(EXAMPLES / "recipe.toml"))
    assert summary(capsys)[:2] == ("mxfp8", str(2 * 3))  # the two linear layers of the first block's MLP
    with pytest.raises(ValueError, match="without --fp4compile-recipe"):
        train("--fp4compile-lm-head")


def test_toml_script(capsys, tmp_path):
    short = (EXAMPLES / "train.toml").read_text().replace("steps = 100", "steps = 20")
    settings, quantised = short.split("[fp4compile]")
    (tmp_path / "short.toml").write_text(short)
    losses = main_of("train_toml.py")(str(tmp_path / "short.toml"))
    printed = capsys.readouterr().out
    assert "rule '0'" in printed and "6 of 8 matmuls" in printed

    (tmp_path / "plain.toml").write_text(settings)
    plain = main_of("train_toml.py")(str(tmp_path / "plain.toml"))
    assert "quantised" not in capsys.readouterr().out
    assert losses != plain and losses == pytest.approx(plain, rel=0.1)
    assert losses[-1] < 0.6 * losses[0]


def test_precision_schedule_script(capsys, monkeypatch):
    without_codegen.install(monkeypatch)
    options = ["--steps", "6", "--width", "32", "--device", "cpu"]
    losses = main_of("precision_schedule.py")([*options, "--last", "0.5"])
    summaries = re.findall(r"recipe nvfp4_train: (\d+) of", capsys.readouterr().out)
    assert summaries == ["6", "4"]  # two layers, with and without their forward products
    constant = main_of("precision_schedule.py")([*options, "--last", "0"])
    assert losses[:3] == constant[:3] and losses[4:] != constant[4:]


@pytest.mark.parametrize("learned", [False, True], ids=["nearest", "gptq"])
def test_evaluation_of_a_packed_model(tmp_path, monkeypatch, capsys, learned):
    """lm-eval, which is not among the packages of the tests, gets the packed model and the tasks.

    The script was run with lm-eval 0.4.13 itself, and a task of its own.
    """
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    letters = {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel({**letters, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(f"paragraph {i} of some text" for i in range(8)))
    seen = []

    def evaluate(model, tasks, limit, task_manager, log_samples):
        seen.append((model, tasks))
        return {"results": {"own": {"acc": float(model(torch.tensor([[65, 66]])).logits.isfinite().all())}}}

    def module(name, **members):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))

    module("lm_eval", simple_evaluate=evaluate)
    module("lm_eval.models.huggingface", HFLM=lambda model, tokenizer, batch_size: model)
    module("lm_eval.tasks", TaskManager=lambda include_path: None)
    module("lm_eval.utils", make_table=lambda found: f"acc {found['results']['own']['acc']}")
    how = ["--method", "gptq", "--scales", "mse", "--samples", str(tmp_path / "text.txt")] if learned else []
    options = [
        "--recipe",
        "nvfp4_weight_only",
        "--tasks",
        "own",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out.json"),
    ]
    main_of("evaluate_packed.py")([str(tmp_path), *options, *how])
    ((model, tasks),) = seen
    assert tasks == ["own"] and len(packed_in(model)) == 7
    printed = capsys.readouterr().out
    assert "acc 1.0" in printed and ("mse, gptq" in printed) == learned
    assert json.loads((tmp_path / "out.json").read_text()) == {"own": {"acc": 1.0}}


# `python -m fp4compile`, of which Inductor writes no code: what it makes of the layers, a Llama shows.
WITHOUT_CODE = """
import pytest, sys
from fp4compile.cli.main import main
from tests.helpers import without_codegen
without_codegen.install(pytest.MonkeyPatch())
sys.exit(main(sys.argv[1:]))
"""


def test_hf_trainer_with_nothing_but_flags(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer = ["examples/train_hf_trainer.py", "--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "4",
               "--logging_steps", "1", "--learning_rate", "1e-3", "--save_strategy", "no", "--report_to", "none",
               "--dataloader_drop_last"]  # fmt: skip
    flags = ["--torch_compile", "--torch_compile_backend", "fp4compile_mxfp8"]
    done = Program(["-c", WITHOUT_CODE, "run", *trainer, *flags], tmp_path).ended()
    assert done.status == 0, done.said
    # Seven linear layers a block, two blocks, three products each.
    assert re.search(r"recipe mxfp8: 42 of \d+ matmuls quantised", done.said)
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", done.printed)]
    monkeypatch.setattr(sys, "argv", trainer)
    runpy.run_path(str(ROOT / trainer[0]), run_name="__main__")  # uncompiled, in this process
    exact = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", capsys.readouterr().out)]
    assert len(losses) == 4 and losses != exact and losses == pytest.approx(exact, abs=0.02)
    assert losses[-1] < losses[0] - 0.3 and all(map(math.isfinite, losses))


def test_accelerate_takes_the_names():
    utils = pytest.importorskip("accelerate.utils")
    fp4compile.register_with_accelerate()
    for name in ("fp4compile", "fp4compile_nvfp4"):
        assert utils.TorchDynamoPlugin(backend=name).to_dict()["backend"] == name
        assert utils.DynamoBackend(name.upper()) is utils.DynamoBackend(name.upper())
    assert utils.TorchDynamoPlugin(backend="inductor").backend is utils.DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        utils.DynamoBackend("FP4COMPILE_NVFP5")
