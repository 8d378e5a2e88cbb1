"""The model of predicted times: against torchao's published figures, its own symbols, the operands' true bytes, the
kernels that the compiler really uses, and common sense."""

import itertools
import json
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import fp4compile
from benchmarks import llama_block, roofline_fit
from benchmarks import roofline as comparison
from fp4compile import hardware
from fp4compile.formats import formats, reference
from fp4compile.formats.layouts import to_swizzled
from fp4compile.recipe import recipes
from fp4compile.roofline import layer_sizes as roofline_sizes
from fp4compile.roofline import model as roofline
from fp4compile.roofline import time_terms
from fp4compile.roofline.layer_sizes import Sizes
from fp4compile.roofline.model import GPUS, Experts, Gpu, predict
from fp4compile.templates import choose
from fp4compile.templates.gemm import cost
from tests.helpers import without_codegen


def test_torchaos_published_columns():
    """(bf16 product + overhead) / (NVFP4 product + overhead) on a GB200, M = N = K, to the printed digits."""
    published = {True: "1.00 2.39 2.92 3.34 3.63", False: "1.00 2.71 3.44 3.68 3.83"}
    for dynamic, column in published.items():
        pairs = (comparison.torchao_gb200(s, s, s, dynamic=dynamic) for s in (1024, 2048, 4096, 8192, 16384))
        assert " ".join(f"{plain / quantised:.2f}" for plain, quantised in pairs) == column


def drawn(rng, most):
    """A size of up to 2 ** most, small ones as often as large ones."""
    return int(2 ** rng.uniform(0, most))


def test_times_keep_both_bounds_and_grow_with_each_size(monkeypatch):
    """Of any layer, experts too: what no GPU can undercut by its published rates, counted apart from the model."""
    rng, kinds, chosen_for = random.Random(0), (None, None, *roofline_sizes.GROUPINGS), roofline._chosen
    monkeypatch.setattr(roofline, "_layer", roofline._layer.__wrapped__)  # without its cache
    for _ in range(300):
        chosen = []
        monkeypatch.setattr(roofline, "_chosen", lambda *given: chosen.append(chosen_for(*given)) or chosen[-1])  # noqa: B023
        (name, gpu), recipe, train = rng.choice(list(GPUS.items())), rng.choice(list(recipes())), rng.random() < 0.5
        m, n, k, kind = drawn(rng, 17), drawn(rng, 15), drawn(rng, 15), rng.choice(kinds)
        experts = None if kind is None else Experts(drawn(rng, 9), kind)
        case = (recipe, name, m, n, k, train, experts)
        found = predict(recipe, name, m, n, k, train=train, experts=experts)
        flops, count = (6 if train else 2) * m * n * k, experts.count if experts else 1
        rows, weights = 2 * m * (n + k), 2 * min(count, m) * n * k
        least = 2 * rows + weights + 2 * count * n * k if train else rows + weights / 4  # three results; codes of FP4
        peak = gpu.fp8 if "float8" in recipe else gpu.bf16 if gpu.sm < 100 else max(gpu.fp8, gpu.fp4)
        assert found.seconds > max(flops / peak, least / gpu.bandwidth), case
        assert found.plain_seconds > max(flops / gpu.bf16, (least if train else rows + weights) / gpu.bandwidth), case
        for i in range(3):
            larger = [size + drawn(rng, 12) * (i == axis) for axis, size in enumerate((m, n, k))]
            monkeypatch.setattr(roofline, "_chosen", mock.Mock(side_effect=chosen))  # by the same kernels
            more = predict(recipe, name, *larger, train=train, experts=experts)
            assert more.seconds >= found.seconds and more.plain_seconds >= found.plain_seconds, (case, larger)


def test_no_fp4_speed_without_fp4_units():
    for gpu in ("H100", "H200"):
        for recipe in ("nvfp4", "nvfp4_train", "mxfp4", "mxfp8"):
            found = predict(recipe, gpu, 8192, 8192, 8192)
            assert found.gain < 1 and found.binds == "matrix"
            product = next(step for step in found.steps if step.flops)
            assert product.rate <= GPUS[gpu].bf16
        assert 1.5 < predict("float8_rowwise", gpu, 8192, 8192, 8192).gain < 2
    assert predict("nvfp4", "B200", 8192, 8192, 8192).gain > 2 > predict("nvfp4", "B200", 64, 512, 512).gain
    assert predict("nvfp4", "B200", 1, 512, 512).binds == "launches"


@pytest.mark.parametrize("name", formats.NAMED)
def test_bytes_are_those_of_the_tensors(name):
    fmt = formats.get(name)
    for rows, columns in ((1, 32), (100, 1000), (256, 256)):
        data, scales, outer = reference.quantize(torch.ones(rows, columns), fmt)
        sizes = [data.nbytes, 0 if scales is None else scales.nbytes, outer.nbytes if fmt.outer == "row" else 0]
        if fmt.scale is not None:  # a row's outer scales are 4 bytes a row, and not in `stored`
            sizes[2] = 0
        assert time_terms.stored(fmt, rows, columns, native=False) == sum(sizes)
        if fmt.scale is not None:
            each_row = scales.repeat_interleave(fmt.block[0], 0)[:rows]
            assert time_terms.stored(fmt, rows, columns, native=True) == data.nbytes + to_swizzled(each_row).nbytes


def quantising(recipe, gpu="B200", sizes=(8192, 8192, 8192), train=False, **fields):
    chosen = {"recipe": recipe, **fields}
    return {s.name: s for s in predict(chosen, gpu, *sizes, train=train).steps if s.name.startswith("quantise")}


def test_how_often_an_operand_is_read():
    numel = 8192**2
    written = time_terms.stored(formats.get("nvfp4"), 8192, 8192, native=True)
    for recipe, reads in (("nvfp4", 2), ("nvfp4_static", 1), ("nvfp4_one_level", 1), ("nvfp4_rowwise", 1)):
        (step,) = quantising(recipe).values()
        assert step.bytes == reads * 2 * numel + written, recipe
    dynamic, static = (quantising(recipe)["quantise fprop_x, rows"] for recipe in ("nvfp4", "nvfp4_static"))
    assert dynamic.overhead == 2 * static.overhead > 0


def test_weights_are_quantised_where_nothing_keeps_them():
    assert list(quantising("mxfp8")) == ["quantise fprop_x, rows"]
    assert list(quantising("mxfp8", weight_cache="off")) == ["quantise fprop_x, rows", "quantise fprop_w, rows"]
    assert list(quantising("mxfp8", train=True)) == [
        "quantise fprop_x, both", "quantise fprop_w, rows", "quantise dgrad_dy, both", "quantise dgrad_w, columns"
    ]  # fmt: skip


def test_what_the_hadamard_transform_costs():
    """The kernels that write the weight gradient's operands compute it, and no others; the bytes stay the same."""
    with_it, without = (quantising("nvfp4_train", train=True, hadamard=products) for products in (("wgrad",), ()))
    transformed = {"quantise fprop_x, both": 1.0, "quantise dgrad_dy, both": time_terms.QUANTISERS.stochastic}
    assert with_it.keys() == without.keys() > transformed.keys()
    for name, step in without.items():
        if name in transformed:
            reached = time_terms.QUANTISERS.both * transformed[name]
            assert step.bandwidth == pytest.approx(GPUS["B200"].copy_rate * reached)
            step = replace(step, bandwidth=pytest.approx(step.bandwidth * time_terms.QUANTISERS.hadamard))
        assert with_it[name] == step, name
    for name in transformed:
        gained = without[name].memory / with_it[name].memory
        assert gained == pytest.approx(time_terms.QUANTISERS.hadamard) and gained < 1


def test_the_hadamard_transform_of_operands_that_are_quantised_apart():
    apart = {"fprop_x": "nvfp4", "dgrad_dy": "nvfp4", "stochastic_rounding": ()}
    with_it, without = (
        quantising("nvfp4_train", train=True, hadamard=products, **apart) for products in (("wgrad",), ())
    )
    slower = {name for name, step in with_it.items() if step.seconds > without[name].seconds}
    assert slower == {"quantise wgrad_x, columns", "quantise wgrad_dy, columns"}
    columns = GPUS["B200"].copy_rate * time_terms.QUANTISERS.columns * time_terms.QUANTISERS.hadamard
    assert all(with_it[name].bandwidth == pytest.approx(columns) for name in slower)
    assert all(with_it[name] == step for name, step in without.items() if name not in slower)


@pytest.mark.parametrize("recipe, merged", [("nvfp4_train", 2), ("nvfp4_rowwise", 1), ("nvfp4_static", 0)])
def test_both_directions_are_one_kernel_where_the_compiler_merges_them(recipe, merged, monkeypatch):
    without_codegen.install(monkeypatch)
    torch._dynamo.reset()
    backend = fp4compile.backend(recipe, **({"static_scales": {"": 1.0}} if merged == 0 else {}))
    x = torch.randn(64, 128, requires_grad=True)
    torch.compile(torch.nn.Linear(128, 256, bias=False), backend=backend)(x).sum().backward()
    assert backend.report.counts["merge_quantize"] == merged
    assert sum(name.endswith("both") for name in quantising(recipe, sizes=(64, 256, 128), train=True)) == merged


def names(recipe, gpu, *sizes, train=False):
    return [step.name for step in predict(recipe, gpu, *sizes, train=train).steps]


def test_what_is_not_fused_is_a_pass():
    large = (8192, 8192, 8192)
    assert "rescale" in names("float8_rowwise", "B300", *large)
    assert "rescale" not in names("float8_rowwise", "B200", *large)
    assert names("nvfp4", "H200", *large) == ["quantise fprop_x, rows", "wgmma_sm90"]
    larger = (16384, 8192, 8224)  # K is no multiple of 64
    assert names("nvfp4", "H200", *larger) == [
        "quantise fprop_x, rows", "dequantise fprop_w", "dequant_operand", "rescale"
    ]  # fmt: skip
    assert "dequantise fprop_x" in names("nvfp4", "H200", *larger, train=True)  # its codes are kept for the backward
    assert "rescale" not in names("nvfp4_one_level", "H200", *larger)
    assert names("nvfp4_weight_only", "H200", 1, 8192, 8192) == ["gemv"]
    assert names("nvfp4", "B200", *large)[1:] == ["library_block_scaled", "multiply outer scales"]
    assert names("nvfp4_one_level", "B200", *large)[1:] == ["library_block_scaled"]


def test_the_assumptions_are_those_of_the_cost_model():
    assert pytest.approx(cost.TILE_SHARE * cost.REACHED, rel=1e-3) == time_terms.TRITON_SM100
    assert time_terms.OUTER_SCALES == cost.OUTER_SCALES
    names, streaming = {each.name for each in choose.REGISTRY}, {"gemv", "skinny", "grouped_skinny"}
    of_all = {name if name in names else name.removeprefix("grouped_") for name in {*time_terms.KERNELS} - streaming}
    assert of_all <= names


def test_products_share_the_steps():
    found = predict("nvfp4", "B200", 512, 1024, 1024, train=True)
    assert [step.product for step in found.plain] == list(roofline.PRODUCTS)
    assert {step.product for step in found.steps} == set(roofline.PRODUCTS)
    found = predict("nvfp4_weight_only", "B200", 512, 1024, 1024, train=True)
    plain, planned = ([step for step in each if step.product == "dgrad"] for each in (found.plain, found.steps))
    assert plain == planned, "whose operands stay as they are"


# ---------------------------------------------------------------- tiles, experts


def test_whole_tiles_in_whole_turns():
    """Dense, groups that end in the middle of a tile, batches, results of each expert; by hand, 132 multiprocessors."""
    tile = 2 * 128 * 128

    def flops(product, *sizes, experts=None):
        return Sizes.of(product, *sizes, experts).flops((128, 128), 132)

    assert flops("fprop", 16, 1024, 4096) == flops("fprop", 128, 132 * 128, 4096) == tile * 4096 * 132
    assert flops("fprop", 129, 67 * 128, 64) == tile * 64 * 2 * 132  # 134 tiles
    assert flops("fprop", 1000, 128, 64, experts=Experts(8)) == tile * 64 * 132  # 12 tiles
    assert flops("fprop", 128 * 100, 128, 64, experts=Experts(64)) == tile * 64 * 132  # 100 + 32, no turn more
    assert flops("fprop", 128 * 100, 128, 64, experts=Experts(66)) == tile * 64 * 2 * 132
    assert flops("fprop", 200, 128, 64, experts=Experts(200)) == tile * 64 * 2 * 132  # one tile each at least
    assert flops("dgrad", 100, 64, 133 * 128, experts=Experts(1, "batch")) == tile * 64 * 2 * 132
    assert flops("wgrad", 8000, 128, 17 * 128, experts=Experts(8)) == tile * 1000 * 2 * 132  # 8 * 17 tiles
    assert flops("fprop", 8, 128, 64, experts=Experts(256)) == tile * 64 * 132  # 8 experts at most have rows
    assert Sizes.of("wgrad", 8000, 128, 64, None).flops(None, 132) == 2 * 8000 * 128 * 64
    sizes = Sizes.of("fprop", 16384, 768, 2048, Experts(128))
    assert sizes.turns((256, 256), 33) == 12 and sizes.flops((256, 256), 33) == 4 * tile * 2048 * 12 * 33


def test_what_many_small_groups_cost():
    """By hand: turns of the programs that stream weights, of tokens by offsets and by index; of FP8 products."""

    def turns_of(recipe, m, n, k, experts):
        found = predict(recipe, "H200", m, n, k, experts=experts).steps[-1]
        assert found.seconds == pytest.approx(found.overhead + found.between + max(found.matrix, found.memory))
        return found.between / time_terms.KERNELS[found.name].turn

    for m, experts, turns in (
        (128, 128, 12),  # one row each: 128 * 48 tiles of 16 columns, 528 at once
        (512, 128, 6),  # four: 128 * 24 tiles of 8 rows and 32 columns
        (1024, 128, 9),  # eight, of unlike groups: half a tile of rows more for each expert, 192 * 24
        (8, 128, 1), (8, Experts(8, "gather"), 1), (128, Experts(128, "gather"), 12),
    ):  # fmt: skip
        assert turns_of("nvfp4_weight_only", m, 768, 2048, experts) == pytest.approx(turns), m
    assert turns_of("float8_rowwise", 16384, 768, 2048, 128) == pytest.approx(12)
    assert turns_of("float8_rowwise", 16384, 2048, 7168, 8) == pytest.approx(17)


def test_a_decode_step_reads_the_weights_of_its_experts():
    fmt, n, k = formats.get("nvfp4"), 2048, 7168
    for tokens, read in ((3, 3), (64, 8)):
        found = predict("nvfp4_weight_only", "H200", tokens, n, k, experts=8)
        assert [step.name for step in found.steps] == ["grouped_skinny"]
        assert found.steps[0].bytes == time_terms.stored(fmt, read * n, k, False) + 2 * tokens * (k + n)
        assert found.plain[0].bytes == 2 * (read * n * k + tokens * (k + n))
        assert found.binds == "memory" and 2.5 < found.gain < 3.5


def test_steps_of_experts():
    def steps(recipe, gpu, m, **more):
        return [step.name for step in predict(recipe, gpu, m, 2048, 7168, **more).steps]

    dequantised = ["quantise fprop_x, rows", "dequantise fprop_w", "grouped_dequant_operand"]
    assert steps("mxfp8", "H200", 16384, experts=8) == dequantised
    assert steps("nvfp4", "H200", 16384, experts=8) == ["quantise fprop_x, rows", "grouped_wgmma_sm90"]
    assert steps("nvfp4", "H200", 8, experts=8) == ["quantise fprop_x, rows", "grouped_skinny"]
    assert steps("float8_rowwise", "H200", 16384, experts=8)[-1] == "grouped_library_row_scaled"
    assert steps("nvfp4", "B200", 16384, experts=8)[-1] == "grouped_block_scaled_sm100"
    by_index = predict("nvfp4_weight_only", "H200", 8, 2048, 7168, experts=Experts(8, "gather"))
    assert [step.name for step in by_index.plain] == ["copy matrices", "bf16 GEMM"]
    assert [step.name for step in by_index.steps] == ["grouped_skinny"] and by_index.gain > 4
    trained = predict("nvfp4_train", "B200", 16384, 2048, 7168, experts=64, train=True)
    assert [step.product for step in trained.plain] == list(roofline.PRODUCTS)
    assert {step.product for step in trained.steps} == set(roofline.PRODUCTS)


def test_bf16_times_grow_with_rows_and_experts():
    for gpu, train, how in itertools.product(("H200", "B200"), (False, True), roofline_sizes.GROUPINGS):
        before = 0.0
        for m in (64, 1024, 65536):
            few, many = (predict("nvfp4", gpu, m, 1024, 2048, train=train, experts=Experts(count, how)).plain_seconds
                         for count in (16, 32))  # fmt: skip
            assert before < few <= many
            before = few


def test_the_page_has_the_tiles_and_turns():
    page = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?:`(\w+)`|torch's bf16 product) \| [^|\d]*(\d+) x (\d+).*\| ([\d.]+) \|$", page, re.MULTILINE
    )
    found = {name or "plain": ((int(height), int(width)), float(us)) for name, height, width, us in rows}
    by_launch = {"grouped_skinny": (8, 16), "grouped_wgmma_sm90": (16, 128),
                 "grouped_dequant_tiles": (128, 128)}  # the first of those on the page  # fmt: skip
    of_groups = {name: kernel for name, kernel in time_terms.KERNELS.items() if name.startswith("grouped_")}
    assert found == {
        name: (by_launch.get(name, kernel.tile), pytest.approx(1e6 * kernel.turn))
        for name, kernel in {**of_groups, "plain": time_terms.LIBRARY["grouped"]}.items()
    }  # fmt: skip


def test_operands_that_are_written_as_values():
    """In 16 bits, and not dequantised again; the codes of packed weights and for the weight gradient are kept."""
    m, n, k, count = 16384, 2048, 7168, 8
    x, dy, w = m * k, m * n, count * n * k
    found = predict("mxfp8", "H200", m, n, k, train=True, experts=count)
    steps = {step.name: step.bytes for step in found.steps if step.name != "grouped_dequant_operand"}
    codes = time_terms.stored(formats.get("mxfp8"), k, m, False)
    assert steps == {
        "quantise fprop_x, both": 2 * x + 2 * x + codes, "quantise fprop_w, rows": 4 * w,
        "quantise dgrad_dy, both": 2 * dy + 4 * dy, "quantise dgrad_w, columns": 4 * w,
        "dequantise wgrad_x": codes + 2 * x,
    }  # fmt: skip
    (_, *kept) = predict("mxfp8", "H200", m, n, k, experts=count).steps
    assert [step.name for step in kept] == ["dequantise fprop_w", "grouped_dequant_operand"]
    few = predict("nvfp4", "H200", 128, n, k, train=True, experts=count)  # 16 rows each: dequantised in the main loop
    assert not [step for step in few.steps if step.name.startswith("dequantise")]
    assert {step.name: step.bytes for step in few.steps}["quantise fprop_w, rows"] < 5 * w  # two reads, and codes


@pytest.mark.parametrize("arguments, said", [
    ((0,), "count=0, expected a positive"), ((True,), "count=True"), ((8.0,), "count=8.0"),
    ((8, "columns"), "unknown grouping 'columns'; allowed are rows, batch, gather"),
])  # fmt: skip
def test_experts_that_no_layer_has(arguments, said):
    with pytest.raises(ValueError, match=said):
        predict("nvfp4", "B200", 64, 64, 64, experts=arguments[0] if len(arguments) == 1 else Experts(*arguments))


# ---------------------------------------------------------------- GPUs


def test_the_page_has_every_gpu():
    page = (Path(__file__).parents[2] / "docs" / "roofline.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]+) \| ", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(GPUS)
    for name, *figures in rows:
        gpu = GPUS[name]
        scaled = (gpu.bf16 / 1e12, (gpu.fp8 or 0) / 1e12, (gpu.fp4 or 0) / 1e12, gpu.bandwidth / 1e12)
        assert [float(figure or 0) for figure in figures] == pytest.approx(scaled)
        assert gpu.source and gpu.share_source and gpu.devices


@pytest.mark.parametrize(
    "device, gpu",
    [("NVIDIA GB200", "GB200"), ("NVIDIA H200", "H200"), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA H100 PCIe", None)],
)
def test_the_gpu_that_is_there(device, gpu, monkeypatch):
    assert hardware.present() is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: device)
    assert hardware.present() == (None if gpu is None else GPUS[gpu])


def own(**changed):
    figures = {"sm": 100, "multiprocessors": 148, "bf16": 1e15, "fp8": 2e15, "fp4": 4e15, "bandwidth": 1e12}
    return Gpu("mine", source="mine", **(figures | changed))


def test_a_gpu_of_ones_own():
    assert (
        predict("mxfp8", own(bandwidth=2e12), 16, 8192, 8192).seconds < predict("mxfp8", own(), 16, 8192, 8192).seconds
    )
    assert hardware.named("h200") is GPUS["H200"] and hardware.named(own()) == own()
    with pytest.raises(ValueError, match="mine has no rate of FP4 products, and library_block_scaled"):
        predict("nvfp4", own(fp4=None), 8192, 8192, 8192)


@pytest.mark.parametrize("changed, said", [
    ({"bf16": 0}, "bf16=0: must be positive"), ({"bandwidth": float("inf")}, "bandwidth=inf"),
    ({"memory_share": 1.1}, "memory_share=1.1: must be above 0 and at most 1"), ({"launch": -1.0}, "launch=-1.0"),
    ({"fp8": float("nan")}, "fp8=nan"), ({"bf16": None}, "bf16=None"), ({"fp4_share": 0}, "fp4_share=0"),
    ({"sm": 0}, "sm=0: must be positive"), ({"fp8_share": None}, "fp8_share=None"),
    ({"bf16": "1e15"}, "bf16='1e15': expected a number"), ({"bandwidth": True}, "bandwidth=True: expected a number"),
    ({"memory_share": "all"}, "memory_share='all': expected a number"), ({"sm": "100"}, "sm='100': expected a whole"),
    ({"multiprocessors": 148.5}, "multiprocessors=148.5: expected a whole number"),
])  # fmt: skip
def test_figures_that_no_gpu_has(changed, said):
    with pytest.raises(TypeError if said.endswith(("number", "whole")) else ValueError, match=said):
        own(**changed)


@pytest.mark.parametrize("arguments, said", [
    (("nvfp4", "B20", 1, 1, 1), "unknown GPU 'B20'. Did you mean 'B200'.* Allowed: B200, B300, GB200, H100, H200, RTX"),
    (("nvfp5", "B200", 1, 1, 1), "unknown recipe 'nvfp5'.*Allowed: float8_rowwise, "),
    (("nvfp4", "B200", 0, 1, 1), "m=0: expected a positive whole number"),
    (("nvfp4", "B200", 1, -16, 1), "n=-16: expected"), (("nvfp4", "B200", 1, 1, 64.0), "k=64.0: expected"),
    (("nvfp4", "B200", True, 1, 1), "m=True: expected"), (("nvfp4", "B200", "8", 1, 1), "m='8': expected"),
])  # fmt: skip
def test_bad_input(arguments, said):
    with pytest.raises(ValueError, match=said):
        predict(*arguments)


def test_operands_of_other_kinds():
    with pytest.raises(TypeError, match="gpu: expected a name or a Gpu, got int"):
        predict("nvfp4", 200, 1, 1, 1)
    recipe = fp4compile.Recipe(fprop_w="mxfp4")
    assert predict(recipe, "H200", 4096, 1024, 1024).steps[-1].name == "dequant_operand"


# ---------------------------------------------------------------- beside measurements


def test_stored_predictions_are_those_of_the_model():
    """Of layers; `run_all --check`, which a test calls, predicts blocks again."""
    stored, rows = json.loads(comparison.FILE.read_text()), comparison.compared(comparison.stored(), "H200")
    assert (stored["rows"], stored["summary"]) == (rows, comparison.summary(rows))


def test_predictions_of_blocks_are_as_near_to_measurements():
    stored = json.loads(comparison.FILE.read_text())["foreseen"]
    blocks = [row for row in stored if not row["what"].startswith(llama_block.FUNCTION)]
    assert {row["what"] for row in blocks} == {"train an MLP", "prefill", "decode", "train"} and len(blocks) == 15
    assert all(abs(row["error"]) < 0.15 for row in blocks)
    functions = [row for row in stored if row not in blocks]
    assert len(functions) == 42 and statistics.median(abs(row["error"]) for row in functions) < 0.05


def test_predictions_are_as_near_to_measurements_as_the_issue_asks():
    """Of all times of a kind, and of those to which nothing was fitted."""
    rows = comparison.compared(comparison.stored(), "H200")
    kinds = {row["what"]: row for row in comparison.summary(rows)}
    quantisers = [row for what, row in kinds.items() if what.startswith("quantise kernel")]
    assert kinds["all"]["count"] > 100 and sum(row["count"] for row in quantisers) >= 20 and len(quantisers) == 4
    for what in ("bf16 linear", "NVFP4 weight-only linear", "NVFP4 W4A4 linear", "float8 rowwise product"):
        assert kinds[what]["count"] >= 20 and kinds[what]["others"] >= 10, what
    for what, row in kinds.items():
        assert row["median error"] < 0.15 and abs(row["largest error"]) < 0.4, what
        assert row["median of others"] < 0.15, what


def test_times_of_experts_are_those_of_the_kernel_that_is_chosen():
    """Of two that were timed with so many tokens each; a recipe that only an earlier run has is compared, too."""
    content = comparison.stored()["grouped_mm"]
    rows = comparison.compared({"grouped_mm": content}, "H200")
    measured = {row["case"]: row["measured us"] for row in rows}
    timed = {(row["configurations"], row["of"]): row["us"] for row in content["configurations"]}
    for each, kernel in ((64, "tiles"), (128, "tiles"), (256, "operand"), (512, "operand")):
        case = f"Qwen3-30B-A3B, {each} tokens each"
        assert measured[case] == pytest.approx(timed[case, kernel], rel=1e-3)
        assert abs(timed[case, "tiles"] / timed[case, "operand"] - 1) > 0.01
    assert {"DeepSeek-V3, nvfp4", "DeepSeek-V3, float8_rowwise", "Llama-4, 8 each, bf16"} < measured.keys()
    assert len(measured) == len(rows)


def test_the_shares_are_those_of_the_fit():
    """From where they are, no step of one of them makes the error smaller; and a wrong one would not stay."""
    files, now = comparison.stored(), roofline_fit.as_they_are()
    assert roofline_fit.fit(files, now) == now
    wrong = next(each for each in now if each.kernel == "library_row_scaled")
    assert roofline_fit.error(now | {wrong: now[wrong] / 2}, files) > roofline_fit.error(now, files)
