"""What HuggingFace's `Trainer` evaluates after it has trained a compiled model, as docs/launchers.md says."""

import copy

import pytest
import torch

from fp4compile import _inductor_patches
from fp4compile.registration import is_backend
from fp4compile.report.names import unwrapped
from tests.helpers import without_codegen

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.mark.parametrize("how", ("flags", "compiled in place", "run --in-place"))
def test_what_the_trainer_evaluates(how, tmp_path, monkeypatch):
    """With the flags alone, the unquantised model."""
    without_codegen.install(monkeypatch)
    monkeypatch.setattr(torch, "compile", torch.compile)  # is put back after the test
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(4)]
    flags = {"torch_compile_backend": "fp4compile_nvfp4"} if how != "compiled in place" else {}
    if how == "compiled in place":
        model.compile(backend="fp4compile_nvfp4")
    elif how == "run --in-place":
        _inductor_patches.compile_in_place(is_backend, unwrapped)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", **flags
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=tokens, eval_dataset=tokens)
    trainer.train()
    with torch.no_grad():
        batch = {name: torch.stack([sample[name] for sample in tokens]) for name in tokens[0]}
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            plain = model(**batch).loss.item()
        quantised = torch.compile(copy.deepcopy(model), backend="fp4compile_nvfp4")(**batch).loss.item()
    assert abs(plain - quantised) > 1e-4
    expected = plain if how == "flags" else quantised
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
