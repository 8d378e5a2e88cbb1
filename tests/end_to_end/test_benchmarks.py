"""The parts of the training benchmarks that need no trained model."""

import itertools
import json
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from benchmarks import (
    cells,
    common,
    gradient_error,
    grouped_mm,
    launches,
    packed_experts,
    producers,
    scale_sweep,
    training_loss,
)
from benchmarks.training_loss import SHAPES, backend_of, batches, compile_with, loss_of, recipe_of
from fp4compile.cli.demo import Llama, Shape
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.quantize import quantize_kernels
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.heuristics import WgmmaConfig
from fp4compile.templates.launch import dry_run


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


def test_every_variant_is_a_recipe_with_its_switches_turned():
    for variant in (*training_loss.VARIANTS, *gradient_error.VARIANTS):
        if not variant.startswith("bf16"):
            recipe = recipe_of(variant)
            assert bool(recipe.stochastic_rounding) == (recipe.name == "nvfp4_train" and "no_sr" not in variant)
            assert recipe.skip_lm_head == ("with_head" not in variant)
    assert recipe_of("nvfp4_train-dy_only").operands("wgrad") == ("nvfp4_te", None)


@pytest.mark.parametrize("variant, quantised", [("nvfp4_train", False), ("nvfp4_train-with_head", True)])
def test_the_head_is_quantised_where_the_variant_says_so(variant, quantised):
    torch.manual_seed(0)
    model = Llama(Shape(hidden=32, heads=1, inner=32, layers=0, length=16, vocabulary=64))
    tokens = torch.randint(64, (4, 17))
    (_, exact), *_ = gradient_error.mean_gradients(model, [tokens])
    compile_with(backend_of(variant), model, 0)
    (_, found), *_ = gradient_error.mean_gradients(model, [tokens])
    error, along = gradient_error.compare(found, exact, ["lm_head"])
    assert (0.01 < error < 0.5 and 0.8 < along < 1.2) if quantised else (error == 0 and along == pytest.approx(1))


def test_means_of_gradients_and_their_parts():
    torch.manual_seed(0)
    model = Llama(SHAPES["tiny"])
    texts = [torch.randint(512, (2, 9)) for _ in range(4)]
    means = dict(gradient_error.mean_gradients(model, texts))
    singly = [dict(gradient_error.mean_gradients(model, [text]))[1] for text in texts]
    assert list(means) == [1, 4]
    for name, mean in means[4].items():
        torch.testing.assert_close(mean, sum(found[name] for found in singly) / 4)
    parts = gradient_error.parts(means[1])
    assert len(parts["blocks"]) == 14 and len(parts["q_proj"]) == 2 and parts["lm_head"] == ["lm_head"]


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


def test_errors_of_gradients():
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    found = {"a": torch.tensor([3.0, 5.0]), "b": torch.tensor([4.0])}
    assert gradient_error.compare(found, exact, ["a", "b"]) == (1.0, 1.0)
    assert gradient_error.compare(exact, found, ["b"]) == (0.0, 1.0)


def test_each_further_training_starts_from_the_weights(args, monkeypatch):
    monkeypatch.setattr(gradient_error, "HELD_OUT", 1)
    args.rate, args.further, args.times = 1e-2, 2, 2
    torch.manual_seed(0)
    model = Llama(SHAPES["tiny"])
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    losses = gradient_error.losses_further_on(model, weights, args, 0)
    model.load_state_dict(weights)
    gradient_error.train_further(model, args, 2)
    (held_out,) = batches(args, 4, 1)
    assert losses[1] == pytest.approx(loss_of(model, held_out).item(), rel=1e-6)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_distance_from_bf16():
    found = {"bf16": {"losses": [1.0, 2.0]}, "other": {"losses": [1.01, 2.04]}}
    assert gradient_error.distance("other", found) == pytest.approx((1.5, 0.5))
    assert gradient_error.distance("other", {"other": found["other"]}) == (None, None)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 9, 16, 32, 64, 65, 300])
@pytest.mark.parametrize("name", launches.PRODUCTS)
def test_the_tables_launches_are_among_those_tried(name, m):
    sizes, k = launches.PRODUCTS[name]
    chosen = choose(launches.problem(m, sum(sizes), k)).config
    assert chosen in launches.launches(m, sum(sizes), k)


@pytest.mark.parametrize("name, m", [("gate, up", 1), ("o", 4), ("down", 16), ("o", 64)])
def test_products_are_launched_as_asked(name, m):
    sizes, k = launches.PRODUCTS[name]
    x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    with dry_run(Target(90)):
        weights = [Operand(*quantize_kernels(torch.empty(n, k, device="meta"), "nvfp4"), launches.NVFP4) for n in sizes]
    for asked in launches.launches(m, sum(sizes), k):
        with dry_run(Target(90)) as made, launches.computes(m, k, asked):
            launches.product(x, weights)
        made = [one for one in made if one.kernel.__name__ != "swizzle_a_sm90"]
        assert asked.constants.items() <= made[0].constants.items() and made[0].num_warps == asked.warps
        if isinstance(asked, WgmmaConfig):  # sums of parts are added by another launch
            assert (made[0].grid, len(made)) == (asked.grid(m, sum(sizes)), min(asked.split_k, 2))
        else:
            assert made[0].grid == min(asked.grid, sum(sizes) // (16 * getattr(asked, "tiles", 1)))


def test_launches_that_do_not_fit_or_agree_are_left_out(monkeypatch, capsys):
    expected = torch.ones(2, 3)
    too_large = OutOfResources(2, 1, "shared memory")
    found = [[expected], [expected + 1e-6], [expected], [expected + 1], [expected], too_large]
    monkeypatch.setattr(launches, "product", mock.Mock(side_effect=found))
    for name in ("activations", "packed"):
        monkeypatch.setattr(launches, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert [launches.agrees((3,), 4, 2, {"TILES": 1}) for _ in range(3)] == [True, False, False]
    assert capsys.readouterr().err.count("another result") == 1


def test_sequences_are_timed_in_turns(monkeypatch):
    replayed = []
    monkeypatch.setattr(common, "_captured", lambda calls: SimpleNamespace(replay=partial(replayed.append, calls)))
    times = itertools.chain([60.0, 600.0, 20.0, 200.0, 40.0, 400.0])
    monkeypatch.setattr(common, "_replay", lambda graph: graph.replay() or next(times))
    assert common.graph_times([[print] * 2, [print] * 4], 3) == [20.0, 100.0]
    assert [len(calls) for calls in replayed] == [2, 4] * 4


def test_the_sweeps_figures_are_written(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sweep.json"
    monkeypatch.setattr("sys.argv", ["scale_sweep", "--device", "cpu", "--shape", "32x64", "--out", str(out)])
    scale_sweep.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["weight"] for row in rows] == ["32x64 bfloat16", "32x64 float32"]
    assert all(0.5 < row["error"] < 0.95 and row["ModelOpt us"] is None and row["sweep us"] > 0 for row in rows)
    assert "32x64 float32" in capsys.readouterr().out


def test_grouped_products_on_a_cpu(tmp_path, monkeypatch):
    """Every part of the benchmark, with its smallest experts; their tables have a row for each measurement."""
    small = grouped_mm.Experts(4, 32, 64)
    monkeypatch.setattr(grouped_mm, "MODELS", {"Llama-4": small})
    for name in ("QUANTISED", "GROWING"):
        monkeypatch.setattr(grouped_mm, name, small)
    sizes = ["--tokens", "24", "--growth-tokens", "24", "--replays", "1", "--models", "Llama-4"]
    out = tmp_path / "out.json"
    grouped_mm.main(["--device", "cpu", "--recipes", "mxfp8", *sizes, "--out", str(out)])
    content = json.loads(out.read_text())
    assert content.pop("configurations") == []  # on a GPU only
    found = {part: cells.part_of(part)(content)[1:] for part in grouped_mm.PARTS if part in content}
    assert {part: len(rows) for part, rows in found.items()} == {"decode": 4, "tokens": 6, "weights": 9, "growth": 2}
    assert [row[1] for row in found["tokens"]] == ["bf16", "loop", "mxfp8"] * 2


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


def test_kernels_that_overlap_count_once():
    assert producers.busy([(0, 4), (1, 2), (3, 7), (10, 11)]) == 8


def test_producers_are_quantised_as_their_part_says():
    x, y, weight = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(64).bfloat16()
    made = producers.then(producers.add_rms_norm, producers.quantiser_of("both", "mxfp8"))(x, y, weight)
    value, stream = producers.add_rms_norm(x, y, weight)
    assert torch.equal(made[-1], x + y) and torch.equal(stream, x + y)
    for one, other in zip(made, torch.ops.fp4compile.quantize(value, "mxfp8", [-1, -2]), strict=False):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_configurations_of_grouped_products_are_launched_as_asked():
    with dry_run(Target(90)):
        calls = grouped_mm.grouped_calls(grouped_mm.Experts(8, 2048, 1024), 16384, "meta")
    for kernel, call in calls.items():
        for config in grouped_mm.tried(kernel, call.problem):
            with dry_run(Target(90)) as made:
                grouped_mm.KERNELS[kernel].run(call, config)
            assert config.constants.items() <= made[-1].constants.items()
        assert grouped_mm.KERNELS[kernel].serves(call.problem)


def test_tiles_of_grouped_tokens_are_launched_as_asked(monkeypatch):
    """On paper: every configuration is one launch after that of the amaxes."""
    monkeypatch.setattr(grouped_mm, "call_times", lambda sequences, args: [calls[0]() is None for calls in sequences])
    with dry_run(Target(90)) as made:
        found = list(grouped_mm.rows_of_tokens("DeepSeek-V3", SimpleNamespace(tokens=16384, device="meta")))
    launched = [one for one in made if one.kernel.__name__ == "quantize_rows"]
    assert len(launched) == len(found) - 1 and len(found) > 4
    for one, row in zip(launched, found[1:], strict=True):
        assert f"rows={one.constants['ROWS']}, blocks={one.constants['BLOCKS']}" in row["launch"]
        assert one.args["data_ptr"].dtype == (torch.float16 if "values" in row["configurations"] else torch.uint8)


def test_both_kernels_of_grouped_products_are_compared():
    shape = grouped_mm.Experts(8, 2048, 1024)
    with dry_run(Target(90)):
        weight = torch.ops.fp4compile.quantize(torch.empty(8, 2048, 1024, device="meta"), "nvfp4", each_matrix=True)
        calls = grouped_mm.both_calls(shape, 128, weight, "meta")
    for of, kernel in (("tiles", "gemm_dequant_tiles_grouped"), ("operand", "gemm_grouped")):
        with dry_run(Target(90)) as made:
            calls[of]()
        assert made[-1].kernel.__name__ == kernel
        assert calls[of].keywords["config"].constants.items() & made[-1].constants.items()


def test_tiles_of_packed_experts_are_launched_as_asked():
    """On paper. Every tile is launched; the values of NVFP4 tokens are multiplied by the table's."""
    shape = packed_experts.shape_of("8x2048x1024")
    with dry_run(Target(90)) as made:
        weight = torch.ops.fp4compile.quantize(torch.empty(8, 2048, 1024, device="meta"), "nvfp4", each_matrix=True)
        x, offs = shape.rows(1024, "meta"), torch.empty(8, dtype=torch.int32, device="meta")
        calls = packed_experts.calls_of(x, [], [weight], offs)
        for tile, config in packed_experts.TILES.items():
            calls[f"tile {tile}"][0]()
            assert made[-1].kernel.__name__ == "gemm_wgmma_sm90"
            assert (made[-1].constants["ROWS"], made[-1].constants["PARTS"]) == (config.rows, config.parts)
        calls["w4a4"][0]()
        assert made[-2].args["a_ptr"].dtype == torch.float16 and made[-2].kernel.__name__ == "swizzle_a_sm90"
        assert [one.constants["GROUPS"] for one in made[-2:]] == [8, 8]


def test_tiles_of_packed_experts_are_fitted():
    """From times that the model makes: a step takes 0.01 us a row, a round 2 us; the best tile is found."""
    rows = []
    for name, tokens in itertools.product(packed_experts.SHAPES, packed_experts.TOKENS):
        shape, times = packed_experts.shape_of(name), {}
        for tile, config in packed_experts.TILES.items():
            rounds = -(-shape.experts * -(-tokens // config.rows) * shape.n // (128 * config.parts) // 132)
            arranged = tokens * shape.experts * shape.k / packed_experts.SWIZZLED_PER_US
            times[f"tile {tile}"] = rounds * (shape.k // 128 * 0.01 * config.rows + 2.0) + arranged
        rows.append({"experts": name, "tokens": tokens, "sizes": "equal", "table": "16x128", **times})
    for found in packed_experts.fit(rows, 132):
        expected = 0.01 * packed_experts.TILES[found["tile"]].rows
        assert found["step us"] == pytest.approx(expected) and found["round us"] == pytest.approx(2.0)
        assert found["largest error"] < 1e-9 and found["cases"] == len(rows)
    for row in packed_experts.losses(rows):
        timed = [us for name, us in row_of(rows, row).items() if name.startswith("tile")]
        assert row["loss"] == pytest.approx(row_of(rows, row)["tile 16x128"] / min(timed) - 1) and row["loss"] > 0


def row_of(rows, wanted):
    return next(row for row in rows if (row["experts"], row["tokens"]) == (wanted["experts"], wanted["tokens"]))


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
