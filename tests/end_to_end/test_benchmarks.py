"""The parts of the training benchmarks that need no trained model."""

import itertools
import json
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F

from benchmarks import grouped_mm, producers, training_loss
from benchmarks.training_loss import backend_of, batches, compile_with, loss_of
from fp4compile.cli.demo import Llama, ModelSizes


@pytest.fixture
def args(tmp_path):
    numpy.save(tmp_path / "tokens.npy", numpy.arange(64 * 10 + 1, dtype=numpy.int16) % 512)
    return SimpleNamespace(shape="tiny", tokens=tmp_path / "tokens.npy", device="cpu", seeds=[0], batch=2)


def test_batches_go_on_where_others_ended(args):
    every = list(batches(args, 0, 5))
    assert [tokens.shape for tokens in every] == [(2, 65)] * 5
    assert torch.equal(torch.stack(every[3:]), torch.stack(list(batches(args, 3, 2))))
    starts = torch.cat(every)[:, 0]
    assert len(starts.unique()) == 8  # 64 * (0 .. 9) modulo 512
    with pytest.raises(ValueError, match="6 batches of 2: the text has 10 sequences of 64"):
        next(batches(args, 4, 2))


@pytest.mark.parametrize("variant, quantised", [("nvfp4_train", False), ("nvfp4_train-with_head", True)])
def test_the_head_is_quantised_where_the_variant_says_so(variant, quantised):
    torch.manual_seed(0)
    model = Llama(ModelSizes(hidden=32, heads=1, inner=32, layers=0, length=16, vocabulary=64))
    tokens = torch.randint(64, (4, 17))
    loss_of(model, tokens).backward()
    exact, model.lm_head.weight.grad = model.lm_head.weight.grad, None
    compile_with(backend_of(variant), model, 0)
    loss_of(model, tokens).backward()
    error = ((model.lm_head.weight.grad - exact).norm() / exact.norm()).item()
    assert 0.01 < error < 0.5 if quantised else error == 0


def test_a_layer_of_experts_is_what_each_token_gets_of_two():
    torch.manual_seed(0)
    layer = training_loss.model_of("tiny-experts").layers[0].mlp
    x = torch.randn(2, 5, 64)
    chances = layer.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for place in itertools.product(range(2), range(5)):
        share, experts = chances[place].topk(2)
        for part, expert in zip(share / share.sum(), experts, strict=True):
            gate, up = (layer.gate_up_proj[expert] @ x[place]).chunk(2)
            expected[place] += part * (layer.down_proj[expert] @ (F.silu(gate) * up))
    error = (layer(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.01  # of bf16


def test_grouped_products_on_a_cpu(tmp_path, monkeypatch):
    """Every part of the benchmark, with its smallest experts; their tables have a row for each measurement."""
    small = grouped_mm.Experts(4, 32, 64)
    monkeypatch.setattr(grouped_mm, "MODELS", {"Llama-4": small})
    monkeypatch.setattr(grouped_mm, "PACKED", ("4x32x64",))
    monkeypatch.setattr(grouped_mm, "EACH", (3, 6))
    sizes = ["--tokens", "24", "--replays", "1", "--models", "Llama-4"]
    out = tmp_path / "out.json"
    grouped_mm.main(["--device", "cpu", "--recipes", "mxfp8", "--parts", *grouped_mm.PARTS, *sizes, "--out", str(out)])
    content = json.loads(out.read_text())
    found = {part: content[part] for part in grouped_mm.PARTS}
    counts = {"decode": 4, "packed": 4, "tokens": 6}
    assert {part: len(rows) for part, rows in found.items()} == counts
    assert [row["by"] for row in found["tokens"]] == ["bf16", "loop", "mxfp8"] * 2


def test_producers_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Every part with its smallest tensors, uncompiled: what it calls, and what it writes of that."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    out = tmp_path / "out.json"
    sizes = ["--rows", "32", "--cols", "64", "--tokens", "16", "--repeats", "1", "--tiny"]
    parts = ["--parts", *producers.PARTS, "--recipes", "mxfp8", "nvfp4"]
    producers.main(["--device", "cpu", *parts, *sizes, "--out", str(out)])
    content = json.loads(out.read_text())
    assert [len(content[part]) for part in producers.PARTS] == [12, 6, 9, 2, 2, 2]
    assert all(row["apart us"] > 0 for part in producers.PARTS for row in content[part])
    assert content["settings"]["seconds"].keys() == set(producers.PARTS)
    assert "silu, mul" in capsys.readouterr().out


def test_the_peers_of_grouped_products_compute_the_same():
    torch.manual_seed(0)
    sizes = grouped_mm.group_sizes(40, 4)
    shape = grouped_mm.Experts(4, 32, 64)
    x, weight, offs = shape.rows(40, "cpu"), shape.weights("cpu"), grouped_mm.offsets(sizes, "cpu")
    assert sum(sizes) == 40
    expected = torch.nn.functional.grouped_mm(x, weight.mT, offs=offs)
    torch.testing.assert_close(grouped_mm.loop(x, weight, sizes), expected)
    packed = torch.ops.fp4compile.quantize(weight, "nvfp4", each_matrix=True)
    assert (grouped_mm.weight_only(x, packed, offs) - expected).norm() < 0.2 * expected.norm()
    assert (grouped_mm.quantised(x, packed, offs) - expected).norm() < 0.2 * expected.norm()
    index = torch.tensor([3, 0, 3])
    expected = grouped_mm.gathered_bf16(x[:3, None], weight, index)
    torch.testing.assert_close(grouped_mm.gathered_loop(x[:3, None], weight, index.tolist()), expected)
    for format in (None, "nvfp4"):
        assert (grouped_mm.gathered(x[:3, None], format, packed, index) - expected).norm() < 0.2 * expected.norm()
