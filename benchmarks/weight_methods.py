"""What does each way to make codes of weights cost a trained model?

The model of `benchmarks.minilm` in float32, packed (`pack_`) and run eagerly: cosine similarity of its embeddings to
those of the unpacked model. Weights alone are quantised, or weights and activations. Methods that take batches are run
with several samples of 256 sentences of the standard library's docstrings. The table has the mean over samples, of two
texts that are in none of them:

A: sentences from docstrings of other files.
B: sentences of another domain, from the descriptions and licences of the installed packages.

"error A" and "error B" are standard errors of the mean over sentences, of the first sample. "samples A" is the standard
deviation over samples.

    python -m benchmarks.weight_methods [--samples 3] [--device D] [--out FILE]
"""

import copy
import random
import statistics
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

import fp4compile
from benchmarks import common, minilm
from fp4compile.weights.buffers import PackedWeight, packed_in

SENTENCES, HELD_OUT, OTHER_DOMAIN, BATCH = 256, 224, 128, 32
FALLBACKS = 3
# (weights, scales, method, layers in MXFP8)
METHODS = (
    ("nvfp4", "amax", "nearest", 0), ("nvfp4", "mse", "nearest", 0), ("nvfp4", "mse", "nearest", FALLBACKS),
    ("nvfp4", "amax", "gptq", 0), ("nvfp4", "mse", "gptq", 0), ("nvfp4", "mse", "gptq", FALLBACKS),
    ("mxfp4", "amax", "nearest", 0), ("mxfp4_even", "amax", "nearest", 0), ("mxfp4", "mse", "nearest", 0),
    ("mxfp4", "mse", "gptq", 0),
)  # fmt: skip
ACTIVATIONS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp4_even": "mxfp4", "mxfp8": "mxfp8"}


def docstrings(files: list[Path]) -> list[str]:
    """The sentences of docstrings of some files, each once, at most one a docstring."""
    return list(dict.fromkeys(filter(None, map(_sentence, minilm.docstrings(files)))))


def descriptions() -> list[str]:
    """The sentences of the descriptions and licences of installed packages, each once, in the order of their names."""
    return list(dict.fromkeys(sentence for text in _texts_of_packages() for sentence in _sentences(text)))


def _texts_of_packages() -> Iterator[str]:
    for folder in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info")):
        for file in sorted(file for file in folder.rglob("*") if file.name.startswith(("LICENSE", "METADATA"))):
            yield file.read_text(encoding="utf-8", errors="replace").partition("\n\n")[2]


def _sentence(text: str) -> str | None:
    match = minilm.SENTENCE.search(" ".join(text.split()))
    return None if match is None else match.group()


def _sentences(text: str) -> list[str]:
    return minilm.SENTENCE.findall(" ".join(text.split()))


def batches_of(texts: list[str], device: str) -> list[dict[str, torch.Tensor]]:
    """Batches of sentences of similar length, which have little padding."""
    ordered = sorted(texts, key=len)
    return [minilm.tokens(ordered[i : i + BATCH], device) for i in range(0, len(ordered), BATCH)]


def embeddings(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([minilm.embed(model, batch) for batch in batches])


def packed(
    model: torch.nn.Module, method: tuple[str, str, str, int], worst: list[str], batches: list[dict]
) -> torch.nn.Module:
    """The model with weights in codes, and activations as they are."""
    weights, scales, how, fallbacks = method
    recipe = fp4compile.Recipe(fprop_w=weights, weight_scales=scales, weight_method=how,
                               rules=[(layer, "mxfp8") for layer in worst[:fallbacks]])  # fmt: skip
    model = copy.deepcopy(model)
    fp4compile.pack_(model, recipe, batches=batches if recipe.needs_batches else None)
    for layer in packed_in(model).values():
        with_activations(layer, None)
    return model


def with_activations(layer: PackedWeight, format: str | None) -> None:
    """Let a packed layer quantise its input to a format; the codes of its weight do not depend on that."""
    layer.layer_format = replace(layer.layer_format, activation=format)


def cosines(exact: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {text: F.cosine_similarity(exact[text], found[text]) for text in exact}


def row_of(kind: str, method: tuple[str, str, str, int], samples: list[dict[str, torch.Tensor]]) -> dict:
    """A line of the table. samples: the cosines of each sample, by text."""
    weights, scales, how, fallbacks = method
    row: dict = {"quantised": kind, "weights": weights, "scales": scales, "method": how, "in mxfp8": fallbacks}
    for text in ("A", "B"):
        means = [sample[text].mean().item() for sample in samples]
        first = samples[0][text]
        row |= {f"mean {text}": statistics.fmean(means), f"error {text}": (first.std() / len(first) ** 0.5).item()}
        row |= {f"samples {text}": statistics.stdev(means) if len(means) > 1 else None}
    return row | {"samples": len(samples)}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--methods", type=int, default=len(METHODS), help="how many of the methods, to try the script")
    args = parser.parse_args()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for_samples, held_out = docstrings(files[::2]), docstrings(files[1::2])
    known = set(for_samples)
    texts = {
        "A": random.Random(0).sample([one for one in held_out if one not in known], HELD_OUT),
        "B": random.Random(0).sample([one for one in descriptions() if one not in known], OTHER_DOMAIN),
    }
    model = minilm.load(args.device)
    held = {text: batches_of(chosen, args.device) for text, chosen in texts.items()}
    exact = {text: embeddings(model, batches) for text, batches in held.items()}
    samples = [batches_of(random.Random(seed).sample(for_samples, SENTENCES), args.device)
               for seed in range(1, args.samples + 1)]  # fmt: skip
    worst = [one.layer for one in fp4compile.sensitivity(model, samples[0][-1:], "nvfp4").layers]
    rows: list[dict] = []
    for method in METHODS[: args.methods]:
        own = samples if method[2] == "gptq" else samples[:1]
        found: dict[str, list[dict[str, torch.Tensor]]] = {"weights": [], "weights and activations": []}
        for batches in own:
            candidate = packed(model, method, worst, batches)
            for kind, measured in found.items():
                if kind != "weights":
                    for layer in packed_in(candidate).values():
                        with_activations(layer, ACTIVATIONS[layer.layer_format.weight])
                measured.append(cosines(exact, {text: embeddings(candidate, held[text]) for text in held}))
        rows += [row_of(kind, method, measured) for kind, measured in found.items()]
        print(common.table(rows[-2:]), flush=True)
    rows.sort(key=lambda row: row["quantised"])
    settings = {"model": "all-MiniLM-L6-v2", "sentences": SENTENCES, "A": HELD_OUT, "B": OTHER_DOMAIN,
                "in mxfp8": worst[:FALLBACKS], "seeds": list(range(1, args.samples + 1))}  # fmt: skip
    common.publish(args, settings, rows)


if __name__ == "__main__":
    main()
