"""Block scales beside ModelOpt's formulas; the benchmark of packing, a whole run on a CPU, and how it judges it."""

import json
from collections.abc import Iterator

import pytest
import torch

import fp4compile
from benchmarks import packing
from fp4compile.formats import reference_scales


def modelopts_formulas(w, top):
    """The best amax of each block by ModelOpt's formulas, every operation one of PyTorch's."""
    blocks = w.float().reshape(-1, 16)
    least, best = torch.full((len(blocks),), torch.inf), torch.zeros(len(blocks))
    for byte in range(1, 127):
        candidate = reference_scales.value(torch.tensor(byte)) / 448.0
        step = candidate * top / 6.0
        y = blocks.abs() / step
        magnitude = torch.where(y < 2, (2 * y).round() / 2, torch.where(y < 4, y.round(), (y / 2).round() * 2)).clamp(
            max=6
        )
        loss = (blocks.abs() - magnitude * step).square().sum(-1)
        best = torch.where(loss < least, candidate * top, best)
        least = torch.minimum(loss, least)
    return best


TIE = 1e-6  # of the squared error


def kinds(shape: tuple[int, int], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in float32: normal, Student's t of three degrees, of a wide range in two ways, and with zero blocks."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*lead: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, generator=generator, device=device)

    def uniform(columns: int) -> torch.Tensor:
        return torch.rand(shape[0], columns, generator=generator, device=device)

    yield "normal", normal()
    yield "heavy-tailed", normal() / normal(3).square().mean(0).sqrt()
    yield "wide range of rows", normal() * torch.exp2(-20 * uniform(1))
    yield "wide range of elements", normal() * torch.exp2(-20 * uniform(shape[1]))
    yield "30 % zero blocks", normal() * (uniform(shape[1] // 16) > 0.3).repeat_interleave(16, 1)


def disagreements(w: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Blocks of a weight whose best amax differs, [blocks] each: how many, of what kind, and their errors."""
    top = w.double().abs().amax()
    bytes_of = [(best / top.float() * 448.0).to(torch.float8_e4m3fn).view(torch.uint8).int() for best in (ours, theirs)]
    differ = bytes_of[0] != bytes_of[1]
    blocks = w.reshape(-1, 16)[differ].double().abs()
    errors = [_squared_error(blocks, byte[differ], top) for byte in bytes_of]
    larger = torch.maximum(*errors)
    apart = torch.where(larger == 0, 0.0, (errors[0] - errors[1]).abs() / larger)
    tie = apart <= TIE
    adjacent = tie & ((bytes_of[0] - bytes_of[1])[differ].abs() == 1)
    smaller = errors[0] < errors[1]
    counted = {"differ": differ, "ties": tie, "adjacent": adjacent, "better": ~tie & smaller, "worse": ~tie & ~smaller}
    return {name: int(found.sum()) for name, found in counted.items()} | {
        "apart, 1e-6": 1e6 * max(apart.tolist(), default=0.0)
    }


def _squared_error(blocks: torch.Tensor, byte: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """That of blocks [B, 16] of magnitudes, in float64, quantised by the E4M3 scales of these bytes [B]."""
    step = (byte.to(torch.uint8).view(torch.float8_e4m3fn).double() * top / 2688.0).unsqueeze(-1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=blocks.device)
    rests = (blocks.unsqueeze(-1) - grid * step.unsqueeze(-1)).abs().amin(-1)
    return rests.square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sweep_agrees_with_modelopts_formulas(dtype):
    for kind, exact in kinds((64, 128), "cpu"):
        w = exact.to(dtype)
        top = w.float().abs().amax()
        found = disagreements(w, fp4compile.scale_sweep(w, top).flatten(), modelopts_formulas(w, top))
        assert found["differ"] == found["ties"] <= 8 and found["worse"] == 0, kind


def test_what_disagrees_is_told_from_ties():
    w = torch.cat((torch.randn(4, 16), torch.zeros(3, 16)))
    w[0, 0] = 7.0
    top = w.abs().amax()
    ours = fp4compile.scale_sweep(w, top).flatten()
    assert disagreements(w, ours, ours) == {
        "differ": 0, "ties": 0, "adjacent": 0, "better": 0, "worse": 0, "apart, 1e-6": 0.0
    }  # fmt: skip
    chosen = (ours / top * 448).to(torch.float8_e4m3fn).view(torch.uint8)
    chosen[1] += 2  # has more error
    chosen[4] += 1  # of zeros: none has any
    chosen[5] += 7
    theirs = reference_scales.value(chosen) / 448 * top
    better, worse = (disagreements(w, *pair) for pair in ((ours, theirs), (theirs, ours)))
    assert better.pop("apart, 1e-6") > 1e4
    assert better == {"differ": 3, "ties": 2, "adjacent": 1, "better": 1, "worse": 0}
    assert (worse["better"], worse["worse"]) == (0, 1)


def test_a_model_is_packed_saved_and_loaded(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr(packing, "load_alone", packing.load)
    out = tmp_path / "packing.json"
    monkeypatch.setattr("sys.argv", ["packing", "--device", "cpu", "--tiny", "--layers", "1", "--out", str(out)])
    packing.main()
    content = json.loads(out.read_text())
    assert [row["weight_scales"] for row in content["rows"]] == ["amax", "mse", "four_over_six"]
    assert all(row["packed GiB"] < 0.6 * row["bf16 GiB"] and row["pack s"] > 0 for row in content["rows"])
    (loaded,) = content["load"]
    assert (
        loaded["logits equal"] and loaded["shards"] > 1 and loaded["tensors GiB"] == content["rows"][-1]["packed GiB"]
    )


def test_what_packing_costs_too_much():
    rows = [{"weight_scales": "amax", "pack s": 1.0}, {"weight_scales": "mse", "pack s": 3.5}]
    good = {"peak GiB": 5.7, "logits equal": True}
    assert packing.problems([rows[0], rows[1] | {"pack s": 1.1}], good) == []
    assert packing.problems(rows, {"peak GiB": 7.5, "logits equal": False}) == [
        "mse adds 2.50 s to packing, expected less than 2.0", "loading peaks at 7.50 GiB, expected less than 7.0",
        "the loaded model has other logits than the saved one",
    ]  # fmt: skip
