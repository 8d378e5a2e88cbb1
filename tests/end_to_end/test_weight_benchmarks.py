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


def squared_errors(w: torch.Tensor, best: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Those of blocks of a weight in float64, quantised by the E4M3 scales of a best amax of each block."""
    step = ((best / top * 448.0).to(torch.float8_e4m3fn).double() * top.double() / 2688.0).view(-1, 1, 1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    return (w.reshape(-1, 16, 1).double().abs() - grid * step).abs().amin(-1).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sweep_agrees_with_modelopts_formulas(dtype):
    """But for blocks whose errors are equal, where any of two scales is the best."""
    for kind, exact in kinds((64, 128), "cpu"):
        w = exact.to(dtype)
        top = w.float().abs().amax()
        ours, theirs = fp4compile.scale_sweep(w, top).flatten(), modelopts_formulas(w, top)
        assert (ours != theirs).sum() <= 8, kind
        errors = [squared_errors(w, best, top) for best in (ours, theirs)]
        torch.testing.assert_close(*errors, rtol=1e-6, atol=0, msg=kind)


def test_a_model_is_packed_saved_and_loaded(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr(packing, "load_alone", packing.load)
    out = tmp_path / "packing.json"
    monkeypatch.setattr("sys.argv", ["packing", "--device", "cpu", "--tiny", "--layers", "1", "--out", str(out)])
    packing.main()
    content = json.loads(out.read_text())
    assert [row["weight_scales"] for row in content["rows"]] == ["amax", "mse"]
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
