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
# By family: the reasons for which products are left alone.
FAMILIES = {"GPT-2": {ATTENTION, HEAD}, "SigLIP": {ATTENTION, HEAD, ACTIVATIONS, PROBE, "convolution"}}


def with_one_layer(small):
    layers = ("num_hidden_layers", "n_layer", "num_layers")
    return {name: with_one_layer(size) if isinstance(size, dict) else 1 if name in layers else size
            for name, size in small.items()}  # fmt: skip


def one_layer_of(name):
    family = ARCHITECTURES[name]
    return dataclasses.replace(family, small=with_one_layer(family.small))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_inference_of_a_family(name, monkeypatch):
    without_codegen.install(monkeypatch)
    inferred = zoo.inference(one_layer_of(name))
    if name == "SigLIP":  # `nn.MultiheadAttention`, whose weights are no linear layers, is quantised and not packed
        assert inferred["packed SQNR"] > 25
    else:
        assert inferred["packed SQNR"] is None, "the graph and the packed layers have the same bits"
    assert inferred["left alone"].keys() == FAMILIES[name] and inferred["share"] > 0.6


@pytest.mark.slow
def test_a_family(monkeypatch):
    without_codegen.install(monkeypatch)
    monkeypatch.setattr(zoo, "NEW_TOKENS", 4)
    family = one_layer_of("GPT-2")
    trained = zoo.training(family)
    assert trained["without gradient"] == [] and trained["cosine"] > 0.8 and trained["share"] > 0.6
    assert trained["loss"] == pytest.approx(trained["exact loss"], rel=0.1)
    packed, generated = zoo.packing(family), zoo.generation(family)
    assert packed["equal"] and packed["layers"] == 4
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
