"""What does FP4 cost a language model? Perplexity of held-out text, of the model and the text of `training_loss`.

"packed": the model is trained in bf16, then packed (`pack_`) by each method of `weight_methods`, weights alone and
weights with activations. Methods that take batches get 6 of those that the model was trained on. "lost" is the
logarithm of the perplexity over that of the model in bf16.

"switched": the model is trained under nvfp4_train, and the last 10 or 20 % of the steps, from the same state, with all
products in bf16. "lost" compares with the model that was trained in bf16 from the same seed.

Rows are means over seeds, which make the weights and draw the data; the last column has each seed's value. Each run has
a process of its own.

    python -m benchmarks.perplexity [--seeds 0 1 2] [--steps 1000] [--jobs 6]
        [--gpus 2] [--out FILE]
"""

import itertools
import json
import math
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import common, training_loss, weight_methods
from benchmarks.training_loss import Training, batches, compile_with, in_own_process, loss_of, provide_tokens
from fp4compile.cli.demo import Llama
from fp4compile.weights.buffers import packed_in

SAMPLES, HELD_OUT = 6, 20  # batches
METHODS = [method for method in weight_methods.METHODS if not method[3]]
LAST = {"the last 10 % in bf16": 0.9, "the last 20 % in bf16": 0.8}


def main() -> None:
    args = training_loss.parser(__doc__, ("packed", "switched")).parse_args()
    if args.one:
        print(json.dumps({"packed": packed, "switched": switched}[args.one](args)))
        return
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.jobs) as pool:
        provide_tokens(args, Path(directory))
        kinds = [kind for kind in args.variants for _ in args.seeds]
        places = itertools.cycle(range(args.gpus))
        done = pool.map(lambda kind, seed, place: in_own_process(kind, seed, place, args, "benchmarks.perplexity"),
                        kinds, args.seeds * len(args.variants), places)  # fmt: skip
        found: dict[str, list[dict[str, float]]] = {}
        for kind, result in zip(kinds, done, strict=True):
            found.setdefault(kind, []).append(result)
    settings = {name: getattr(args, name) for name in ("steps", "batch", "shape", "rate", "seeds")}
    parts = {kind: rows_of(results, found["packed"]) for kind, results in found.items()}
    common.publish_parts(args, settings | {"samples": SAMPLES, "held out": HELD_OUT}, parts)


def rows_of(results: list[dict[str, float]], unquantised: list[dict[str, float]]) -> list[dict]:
    """A row for each model: results and those of bf16 have the mean loss of each, by seed."""
    rows = []
    for name in results[0]:
        losses = [result[name] for result in results]
        lost = [loss - base["bf16"] for loss, base in zip(losses, unquantised, strict=True)]
        rows.append({"model": name, "perplexity": statistics.fmean(map(math.exp, losses)),
                     "lost": statistics.fmean(lost), "of each seed": [round(value, 4) for value in lost]})  # fmt: skip
    return rows


def held_out_loss(name: str, model: Llama, args) -> float:
    """Mean loss of batches that no step has seen. It goes to stderr at once: a limit may end the run."""
    with torch.no_grad():
        loss = statistics.fmean(loss_of(model, tokens).item() for tokens in batches(args, args.steps, HELD_OUT))
    print(f"seed {args.seeds[0]}: {name}: {loss:.5f}", file=sys.stderr, flush=True)
    return loss


def packed(args) -> dict[str, float]:
    """The loss of the model in bf16, and packed by each method: "weights scales method", "+ activations"."""
    model, _ = training_loss.train("bf16", args)
    for block in model.layers:
        block._compiled_call_impl = None  # packed layers run eagerly, and so does what they are compared with
    model.requires_grad_(False)
    samples = [tokens[:, :-1] for tokens in batches(args, 0, SAMPLES)]
    losses = {"bf16": held_out_loss("bf16", model, args)}
    for method in METHODS:
        with torch.autocast(torch.device(args.device).type, dtype=torch.bfloat16):
            candidate = weight_methods.packed(model, method, [], samples)
        name = " ".join(method[:3])
        losses[name] = held_out_loss(name, candidate, args)
        for layer in packed_in(candidate).values():
            weight_methods.with_activations(layer, weight_methods.ACTIVATIONS[method[0]])
        losses[name + ", activations"] = held_out_loss(name + ", activations", candidate, args)
    return losses


def switched(args) -> dict[str, float]:
    """The loss of models that were trained under nvfp4_train, to the end or not."""
    run = Training(args)
    compile_with(training_loss.backend_of("nvfp4_train"), run.model, len(run.model.layers))
    states = {}
    for name, share in sorted(LAST.items(), key=lambda item: item[1]):
        run.advance(int(share * args.steps))
        states[name] = run.state()
    run.advance(args.steps)
    losses = {"nvfp4_train": held_out_loss("nvfp4_train", run.model, args)}
    compile_with("inductor", run.model, len(run.model.layers))
    for name in LAST:
        run.restore(states[name])
        run.advance(args.steps)
        losses[name] = held_out_loss(name, run.model, args)
    return losses


if __name__ == "__main__":
    main()
