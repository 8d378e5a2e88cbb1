"""The benchmark `zoo` on two families with one layer each, and how it goes on where a run ended."""

import dataclasses
import json

import pytest

from benchmarks import zoo
from benchmarks.architectures import ARCHITECTURES
from tests.helpers import without_codegen

pytest.importorskip("transformers")

ATTENTION, HEAD = "fused attention: its matmuls lie inside one kernel", "output head"
ACTIVATIONS = "no operand is a parameter, and the recipe leaves attention in high precision"
PROBE = "its weight is computed from parameters and is none itself"
# By family: the reasons for which products are left alone, and how many weights are packed.
FAMILIES = {
    "GPT-2": ({ATTENTION, HEAD}, 4),
    "SigLIP": ({ATTENTION, HEAD, ACTIVATIONS, PROBE, "convolution"}, 14),
}


def with_one_layer(small):
    layers = ("num_hidden_layers", "n_layer", "num_layers")
    return {name: with_one_layer(size) if isinstance(size, dict) else 1 if name in layers else size
            for name, size in small.items()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name, monkeypatch):
    without_codegen.install(monkeypatch)
    family = ARCHITECTURES[name]
    family = dataclasses.replace(family, small=with_one_layer(family.small))
    reasons, layers = FAMILIES[name]
    inferred = zoo.inference(family)
    if name == "SigLIP":  # `nn.MultiheadAttention`, whose weights are no linear layers, is quantised and not packed
        assert inferred["packed SQNR"] > 25
    else:
        assert inferred["packed SQNR"] is None, "the graph and the packed layers have the same bits"
    assert inferred["left alone"].keys() == reasons and inferred["share"] > 0.6
    trained = zoo.training(family)
    assert trained["without gradient"] == [] and trained["cosine"] > 0.8 and trained["share"] > 0.6
    assert trained["loss"] == pytest.approx(trained["exact loss"], rel=0.1)
    packed = zoo.packing(family)
    assert packed["equal"] and packed["layers"] == layers
    if name == "GPT-2":
        generated = zoo.generation(family)
        assert generated["equal"] == generated["tokens"] == 2 * zoo.NEW_TOKENS


def row(name, **parts):
    return {"family": name, **dict.fromkeys(zoo.PARTS), **parts}


def test_a_run_goes_on_where_another_ended(tmp_path, monkeypatch, capsys):
    """Families that failed run again; one whose process crashes costs no other."""
    out, ran = tmp_path / "zoo.json", []
    found = {"OPT": row("OPT"), "T5": {"family": "T5", "error": "ended with status -11"}, "BERT": row("BERT")}

    def in_a_process(name, inductor):
        ran.append(name)
        return found[name]

    monkeypatch.setattr(zoo, "in_a_process", in_a_process)
    families = ["--families", *found, "--out", str(out)]
    assert zoo.main(families) == 1 and "T5" in capsys.readouterr().out
    assert ran == ["OPT", "T5", "BERT"]
    found["T5"] = row("T5", training={"without gradient": ["shared.weight"]})
    assert zoo.main(families) == 1
    found["T5"] = row("T5")
    assert zoo.main(families) == zoo.main(families) == 0
    assert ran == ["OPT", "T5", "BERT", "T5", "T5"]
    assert [each["family"] for each in json.loads(out.read_text())["rows"]] == ["OPT", "BERT", "T5"], "as in the table"
