"""Which NVFP4 settings keep a trained model's embeddings?

The model and the measure of `benchmarks.minilm`, in bf16 and packed (`pack_`), run eagerly: with block scales of the
weights chosen in three ways, with activations as they are, with dynamic and with static scales, and with and without
the three layers in MXFP8 that `fp4compile.sensitivity` ranks worst. Calibrated and ranked on other sentences.

    python -m benchmarks.minilm_settings [--sentences 64] [--device D] [--out FILE]
"""

import copy
import math

import torch

import fp4compile
from benchmarks import common, minilm
from fp4compile.recipe import Recipe, named
from fp4compile.weights.linear import PackedLinear

WEIGHT_SCALES = ("amax", "mse", "four_over_six")
# By what activations get: the recipe, and how it is calibrated.
ACTIVATIONS = {
    "unquantised": ("nvfp4_weight_only", None),
    "dynamic": ("nvfp4", None),
    "dynamic, one scale a row": ("nvfp4_rowwise", None),
    "static, largest": ("nvfp4_static", "max"),
    "static, 99.99 %": ("nvfp4_static", "percentile"),
    "static, least squares": ("nvfp4_static", "mse"),
}
FALLBACKS = 3


def packed(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    model = copy.deepcopy(model)
    report = fp4compile.pack_(model, recipe)
    if not report.quantised or any(row.note for row in report.rows):
        raise RuntimeError(f"not every layer is packed as the recipe says:\n{report}")
    return model


def weight_sqnr(exact: torch.nn.Module, model: torch.nn.Module) -> float:
    """Decibels of the weights' power over that of their quantisation error, over all packed layers."""
    power = error = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear):
            layer.weight_dtype = torch.float32
            weight = exact.get_submodule(name).weight.detach().double()
            power += weight.square().sum().item()
            error += (layer.weight.double() - weight).square().sum().item()
    return 10 * math.log10(power / error)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--sentences", type=int, default=64)
    args = parser.parse_args()
    texts = minilm.sentences(2 * args.sentences)
    inputs, samples = (
        minilm.tokens(some, args.device) for some in (texts[: args.sentences], texts[args.sentences :])
    )  # fmt: skip
    model = minilm.load(args.device)
    exact = minilm.embed(model, inputs)
    model = model.bfloat16()
    ranking = fp4compile.sensitivity(model, [samples], "nvfp4")
    worst = [one.layer for one in ranking.layers[:FALLBACKS]]
    rows = []
    for activations, (name, method) in ACTIVATIONS.items():
        base = named(name)
        if method is not None:
            base = fp4compile.calibrate(model, [samples], base, method=method)
        for weight_scales in WEIGHT_SCALES:
            row: dict = {"activations": activations, "weight scales": weight_scales}
            for kind, rules in (("", []), (f", {FALLBACKS} in mxfp8", [(layer, "mxfp8") for layer in worst])):
                candidate = packed(model, base.replace(weight_scales=weight_scales, rules=rules))
                found = minilm.compare("", exact, minilm.embed(candidate, inputs))
                row |= {f"mean cosine{kind}": found["mean cosine"], f"min{kind}": found["min"]}
                if not kind:
                    row["weights dB"] = weight_sqnr(model, candidate)
            rows.append(row)
    settings = {"model": "all-MiniLM-L6-v2", "sentences": args.sentences, "in mxfp8": worst}
    common.publish(args, settings, rows)


if __name__ == "__main__":
    main()
