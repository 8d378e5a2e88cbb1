"""What does quantising the backward products do to gradients, and what of it goes away where gradients are averaged?

The model of `benchmarks.training_loss`, trained in bf16. Gradients of text that it has not seen are compared with those
of the uncompiled model. The forward is bf16 in all variants: what differs is the backward. "one" is the error of one
gradient, ||g_q - g|| / ||g||; "N draws" that of the mean of N gradients of one batch, each of its own seeds, and
"N batches" that of the mean over N batches. What stochastic rounding adds is noise, and falls as 1 / sqrt(N); what
stays is bias. "along g" is <g_q, g> / <g, g> of the mean over all draws.

"-dy_only" quantises the gradient operand alone: the weights and activations that it meets are otherwise rounded to
nearest, always to the same, which draws do not average away. "-with_head" has the LM head quantised too. The gradient
of its output is softmax less one-hot: an element near -1 among small ones, which rounding to nearest turns into zeros.
"blocks" are all weights but the head's.

"loss" is what the errors cost: from the same weights every variant trains on, with its forward in bf16, and the loss of
the uncompiled model on held-out text is compared. It does so several times, each time on other text, the same in all
variants: "+-" is the standard error of the mean distance from bf16. Every variant has a process of its own.

    python -m benchmarks.gradient_error [--variants bf16 nvfp4_train ...] [--steps 1000] [--count 64] [--further 100]
        [--times 4] [--weights FILE] [--out FILE] [--plot FILE]
"""

import json
import math
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fp4compile
from benchmarks import common, training_loss
from benchmarks.training_loss import FORWARD_BF16, backend_of, batches, compile_with, loss_of, model_of, recipe_of
from fp4compile.cli.demo import Llama

SWITCHED = ("", "-no_sr", "-no_hadamard", "-no_sr-no_hadamard")
VARIANTS = (
    "bf16", "mxfp8", *(f"nvfp4_train{off}" for off in SWITCHED), "nvfp4_train-dy_only", "nvfp4_train-dy_only-no_sr",
    *(f"nvfp4_train-with_head{off}" for off in SWITCHED)
)  # fmt: skip
WARM_UP, HELD_OUT = 10, 30
Gradients = dict[str, torch.Tensor]


def main() -> None:
    parser = training_loss.parser(__doc__, VARIANTS)
    parser.add_argument("--count", type=int, default=64, help="average over so many draws and batches: a power of 4")
    parser.add_argument("--sequences", type=int, default=8, help="in a batch that is measured")
    parser.add_argument("--further", type=int, default=100, help="training steps from the same weights on")
    parser.add_argument("--times", type=int, default=4, help="train on so many times")
    parser.add_argument("--weights", type=Path, help="of the model, if it was trained before; written there if not")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.jobs) as pool:
        training_loss.provide_tokens(args, Path(directory))
        args.weights = args.weights or Path(directory) / "weights.pt"
        if not args.weights.exists():
            torch.save(training_loss.train("bf16", args)[0].state_dict(), args.weights)
        done = pool.map(lambda variant: _in_own_process(variant, args), args.variants)
        found = dict(zip(args.variants, done, strict=True))
    asked = ("steps", "batch", "shape", "rate", "seeds", "count", "sequences", "further", "times")
    settings = {name: getattr(args, name) for name in asked}
    rows = [row(variant, part, found) for variant in args.variants for part in measured(variant)]
    common.publish(args, settings | {"found": found}, rows)
    if args.plot:
        plot(found, args.plot)


def _in_own_process(variant: str, args) -> dict:
    more = ("count", "sequences", "further", "times", "weights")
    return training_loss.in_own_process(variant, args.seeds[0], 0, args, "benchmarks.gradient_error", more)


def measure(variant: str, args) -> dict:
    """{part: {"draws" or "batches": {N: [relative error, along g] of the mean of so many}}}, and the "losses"."""
    model = model_of(args.shape).to(args.device)
    weights = torch.load(args.weights, map_location=args.device)
    model.load_state_dict(weights)
    needed = math.ceil(args.count * args.sequences / args.batch)
    unseen = torch.cat(list(batches(args, args.steps, needed))).split(args.sequences)[: args.count]
    exact = dict(mean_gradients(model, unseen))
    backend = backend_of(variant)
    if not isinstance(backend, str):
        backend = fp4compile.backend(recipe_of(variant).replace(**FORWARD_BF16), strict=True)
    compile_with(backend, model, len(model.layers))
    torch.manual_seed(args.seeds[0])
    found: dict[str, dict] = {}
    for over, texts in (("draws", unseen[:1] * args.count), ("batches", unseen)):
        for count, mean in mean_gradients(model, texts):
            truth = exact[1 if over == "draws" else count]
            for part, names in parts(mean).items():
                found.setdefault(part, {}).setdefault(over, {})[count] = compare(mean, truth, names)
    return found | {"losses": losses_further_on(model, weights, args, args.steps + needed)}


def losses_further_on(model: Llama, weights: dict[str, torch.Tensor], args, first: int) -> list[float]:
    """Held-out losses after further training, each time from the weights and on the next batches from `first` on."""
    held_out = list(batches(args, first + args.times * args.further, HELD_OUT))
    plain = model_of(args.shape).to(args.device)
    losses = []
    for start in range(first, first + args.times * args.further, args.further):
        model.load_state_dict(weights)
        train_further(model, args, start)
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            losses.append(torch.stack([loss_of(plain, tokens) for tokens in held_out]).mean().item())
    return losses


def train_further(model: Llama, args, first: int) -> None:
    """Training on the batches from `first` on, at a fifth of the rate."""
    model.zero_grad()
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=args.device != "cpu")
    for step, tokens in enumerate(batches(args, first, args.further), 1):
        for group in optimiser.param_groups:  # Adam's averages are made anew
            group["lr"] = args.rate / 5 * min(1, step / WARM_UP)
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()


def mean_gradients(model: Llama, texts: Iterable[torch.Tensor]) -> Iterator[tuple[int, Gradients]]:
    """(N, mean of the gradients of the first N batches) of all linear layers, for N = 1, 4, 16, ..."""
    model.zero_grad()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    wanted = 1
    for count, tokens in enumerate(texts, 1):
        loss_of(model, tokens).backward()
        if count == wanted:
            yield count, {name: layer.weight.grad / count for name, layer in layers.items()}
            wanted *= 4


def parts(gradients: Gradients) -> dict[str, list[str]]:
    """The weights of all blocks together, of each kind ("q_proj", ...), and of the head."""
    found: dict[str, list[str]] = {"blocks": []}
    for name in gradients:
        kind = name.split(".")[-1]
        found.setdefault(kind, []).append(name)
        if kind != "lm_head":
            found["blocks"].append(name)
    return found


def compare(found: Gradients, exact: Gradients, names: list[str]) -> tuple[float, float]:
    """(||found - exact|| / ||exact||, <found, exact> / <exact, exact>) over the weights of these names."""
    noise = sum((found[name] - exact[name]).square().sum() for name in names)
    signal = sum(exact[name].square().sum() for name in names)
    along = sum((found[name] * exact[name]).sum() for name in names)
    return (noise / signal).sqrt().item(), (along / signal).item()


def measured(variant: str) -> tuple[str, ...]:
    """Those parts of the model that the variant is about."""
    return ("blocks", "lm_head") if "-with_head" in variant else ("blocks",)


def row(variant: str, part: str, found: dict[str, dict]) -> dict:
    draws, over_batches = found[variant][part]["draws"], found[variant][part]["batches"]
    made = {"variant": variant, "weights": part, "one %": 100 * draws["1"][0]}
    for name, errors in (("draws", draws), ("batches", over_batches)):
        made |= {f"{count} {name} %": 100 * errors[count][0] for count in errors if count != "1"}
    made |= {"along g": draws[max(draws, key=int)][1], "loss": statistics.mean(found[variant]["losses"])}
    return made | dict(zip(("over bf16 %", "+-"), distance(variant, found), strict=True))


def distance(variant: str, found: dict[str, dict]) -> tuple[float | None, float | None]:
    """How far the losses are above bf16's of the same text, in percent: the mean, and its standard error."""
    if "bf16" not in found:
        return None, None
    pairs = zip(found[variant]["losses"], found["bf16"]["losses"], strict=True)
    over = [100 * (loss / known - 1) for loss, known in pairs]
    return statistics.mean(over), statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else None


def plot(found: dict[str, dict], path: Path) -> None:
    """Errors over the number of gradients that a mean is of: of draws and of batches, in the blocks and in the head."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 9), sharex=True, sharey="row")
    for part, in_row in zip(("blocks", "lm_head"), axes, strict=True):
        for over, axis in zip(("draws", "batches"), in_row, strict=True):
            for variant in found:
                if part in measured(variant):
                    errors = found[variant][part][over]
                    percent = [100 * error for error, _ in errors.values()]
                    axis.plot([int(count) for count in errors], percent, "o-", label=variant)
            axis.set(xscale="log", yscale="log", xlabel=f"{over} in the mean", ylabel="error, %", title=part)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
