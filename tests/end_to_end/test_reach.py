"""What the benchmark `reach` counts of a model, and how it tells kinds of prologues apart."""

import json

import pytest
import torch
from torch.fx import Graph

from benchmarks import families, reach
from fp4compile.ops.nodes import quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.recipe import named

pytest.importorskip("transformers")

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4}
MXFP8 = (named("mxfp8"),)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The content of the file that the benchmark writes of a narrow Llama, compiled as a block."""
    folder = tmp_path_factory.mktemp("reach")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setattr(reach, "FAMILIES", {"Llama": families.reader("Llama", block=True, recipes=MXFP8, **SIZES)})
        out = folder / "reach.json"
        reach.main(["--device", "cpu", "--families", "Llama", "--modes", "forward", "train", "--out", str(out)])
    return json.loads(out.read_text())


def test_a_llama_reaches_what_its_gpu_has(runs):
    found = {(row["mode"], row["sm"]): row for row in runs["runs"]}
    assert found.keys() == {(mode, sm) for mode in ("forward", "train") for sm in (90, 100)}
    forward, train = found["forward", 100], found["train", 100]
    assert forward["products"] == {"library_block_scaled": 7} and forward["prologues"]["rows"] == 1  # the gate
    assert found["forward", 90]["products"] == {"dequant_operand": 7}
    assert found["train", 90]["prologues"] == {} and any(kind.startswith("both") for kind in train["prologues"])
    assert forward["ops"]["scaled_mm"] == 7 and forward["launches"]["quantize_rows"] > 0
    assert "quantize_rows" in runs["settings"]["options"] and "gemv" in runs["settings"]["never launched"]
    kinds = {row["prologue"]: row for row in runs["prologues"]}
    assert [kinds[kind]["runs"] for kind in ("rows", "rows, values")] == [1, 1], "of 10.0, and of 9.0"
    assert 0 < kinds["rows"]["least %"] < kinds["rows"]["most %"] < 20
    (library,) = (row for row in runs["products"] if row["product"] == "library_block_scaled")
    assert library["runs of sm 90"] == 0 and library["runs of sm 100"] == 2


def test_a_gate_saves_the_bytes_of_a_result(runs):
    """Two bytes are written and two read again of each element: 8192 tokens, at the speed of a copy, and one launch."""
    forward = next(row for row in runs["runs"] if (row["mode"], row["sm"]) == ("forward", 100))
    gpu = reach.GPUS[100]
    most = 8192 * 8192 * 4 / gpu.copy_rate + gpu.launch
    assert 0.5 * most < 1e-6 * forward["saved us"]["rows"] <= most


@pytest.mark.parametrize("steps, options, dims, expected", [
    (["neg aux0"], {}, [-1], "rows"), (["neg aux0"], {"stored": ["s0 bfloat16"]}, [-1, -2], "both, stores"),
    (["erf aux0"], {"values": [-1]}, [-1], "rows, values, erf"),
    (["square aux0", "mean s0", "mul aux0 s1"], {}, [-1], "rows, norm"),
])  # fmt: skip
def test_kinds_of_prologues(steps, options, dims, expected):
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 64, dtype=torch.bfloat16)
    node = graph.call_function(QUANTIZE, (x, "mxfp8", dims), {"prologue": steps, "dtype": torch.bfloat16, **options})
    assert reach.kind_of(quantise_of(node)) == expected
