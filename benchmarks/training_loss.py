"""Does training under a recipe follow bf16? A Llama-style model of 103 M parameters on real text, same seed and data.

fp32 parameters, bf16 autocast, AdamW with warm-up and cosine decay. The text is the prose that every machine with these
packages has: the docstrings of all Python sources installed, each paragraph once, in 32000 tokens of a byte-pair
encoding made from it (by `tokenizers`, which comes with transformers). None of it is seen twice. Every variant has a
process of its own (several at a time: this measures losses, not speed). Compared are the means over the last 50 steps,
and over seeds, which make the weights and draw the data. Even of equal seeds two runs differ: gradients are added up in
any order. "bf16-uncompiled" differs from bf16 by the rounding of fused operations alone: how far it is away is chance.
"-no_sr" and "-no_hadamard" are nvfp4_train without stochastic rounding or the Hadamard transform, "-with_head" has the
LM head quantised, too, "-last_bf16" leaves the last quarter of the blocks in bf16, as skip_last_blocks=2 does where the
whole model is one graph, and "-forward_bf16" does the forward products of the last fifth of the steps in bf16. Of the
shapes, "100M-512" has the same blocks and 512 tokens, so that each is frequent; "tiny" trains on a CPU. "experts" and
"tiny-experts" have a mixture of experts in each block, of which a token takes two.

    python -m benchmarks.training_loss [--variants bf16 mxfp8 ...] [--seeds 0 1 2 3] [--steps 1000] [--jobs 6]
        [--out FILE] [--plot FILE]
"""

import argparse
import ast
import copy
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F

import fp4compile
from benchmarks import common
from benchmarks.experts_layer import ExpertsMLP
from fp4compile.cli.demo import Llama, ModelSizes
from fp4compile.recipe import Recipe, named

SHAPES = {
    "100M": ModelSizes(hidden=1024, heads=16, inner=2816, layers=8, length=512, vocabulary=32000),
    "100M-512": ModelSizes(hidden=1024, heads=16, inner=2816, layers=8, length=512, vocabulary=512),
    "experts": ModelSizes(hidden=768, heads=12, inner=2048, layers=6, length=512, vocabulary=512),
    "tiny": ModelSizes(hidden=64, heads=2, inner=128, layers=2, length=64, vocabulary=512),
    "tiny-experts": ModelSizes(hidden=64, heads=2, inner=128, layers=2, length=64, vocabulary=512),
}
EXPERTS = {"experts": 8, "tiny-experts": 4}  # of each block
VARIANTS = (
    "bf16", "bf16-uncompiled", "mxfp8", "float8_rowwise", "nvfp4_train", "nvfp4_train-no_sr",
    "nvfp4_train-no_hadamard", "nvfp4_train-last_bf16", "nvfp4_train-forward_bf16"
)  # fmt: skip
FORWARD_BF16 = {"fprop_x": None, "fprop_w": None}
SWITCHES = {
    "no_sr": {"stochastic_rounding": ()}, "no_hadamard": {"hadamard": ()}, "with_head": {"skip_lm_head": False},
}  # fmt: skip
TAIL = 50


def main() -> None:
    args = parser(__doc__, VARIANTS).parse_args()
    if args.one:
        print(json.dumps(train(args.one, args)[1]))
        return
    runs = [(variant, seed) for seed in args.seeds for variant in args.variants]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.jobs) as pool:
        provide_tokens(args, Path(directory))
        places = itertools.cycle(range(args.gpus))
        done = pool.map(lambda run, place: in_own_process(*run, place, args), runs, places)
        runs = dict(zip(runs, done, strict=True))
        count = len(numpy.load(args.tokens, mmap_mode="r"))
    settings = {name: getattr(args, name) for name in ("steps", "batch", "shape", "rate", "seeds")}
    settings |= {"tokens of text": count}
    settings |= {"parameters": runs[args.variants[0], args.seeds[0]]["parameters"], "tail": TAIL}
    losses = {variant: {seed: runs[variant, seed]["losses"] for seed in args.seeds} for variant in args.variants}
    rows = [summary(variant, runs, args.seeds) for variant in args.variants]
    common.publish(args, settings | {"losses": losses}, rows)
    if args.plot:
        plot({variant: runs[variant, args.seeds[0]] for variant in args.variants}, args.plot)


def parser(description: str | None, variants: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options of a benchmark that trains the model."""
    made = common.parser(description)
    made.add_argument("--variants", nargs="+", default=variants)
    made.add_argument("--seeds", nargs="+", type=int, default=[0])
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--batch", type=int, default=24)
    made.add_argument("--shape", choices=SHAPES, default="100M")
    made.add_argument("--rate", type=float, default=6e-4)
    made.add_argument("--files", type=int, default=100_000, help="read so many sources at most")
    made.add_argument("--gpus", type=int, default=1, help="spread the runs over so many")
    made.add_argument("--tokens", type=Path, help="encoded text, if it was made before; made there if not")
    made.add_argument("--jobs", type=int, default=len(variants), help="processes at a time")
    made.add_argument("--plot", type=Path, help="write the curves there (needs matplotlib)")
    made.add_argument("--one", help="measure this variant in this process and print what is found")
    return made


def provide_tokens(args, directory: Path) -> None:
    """Encode the text where that was not done before, in the directory where no other place is given."""
    args.tokens = args.tokens or directory / "tokens.npy"
    if not args.tokens.exists():
        encode(args.tokens, SHAPES[args.shape].vocabulary, args.files)


def summary(variant: str, runs: dict, seeds: list[int]) -> dict:
    """Means over seeds; how far the variant is from bf16 of the same seed, on average and each time."""
    mine = [runs[variant, seed] for seed in seeds]
    known = ("bf16", seeds[0]) in runs
    over = [100 * (_tail(run) / _tail(runs["bf16", seed]) - 1) for run, seed in zip(mine, seeds, strict=True) if known]
    return {
        "variant": variant, "loss": statistics.mean(map(_tail, mine)),
        "over bf16 %": statistics.mean(over) if over else None, "of each seed": [round(value, 2) for value in over],
        "quantised %": mine[0]["quantised"], "seconds": max(run["seconds"] for run in mine),
    }  # fmt: skip


def _tail(run: dict) -> float:
    losses = run["losses"][-TAIL:]
    return sum(losses) / len(losses)


def in_own_process(name: str, seed: int, place: int, args, module: str = "benchmarks.training_loss") -> dict:
    """What a module prints of a variant, on the GPU at `place`; its own messages go to stderr as they come."""
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", module, "--one", name, "--seeds", str(seed)]
        for option in ("device", "steps", "batch", "shape", "rate", "tokens"):
            command += [f"--{option}", str(getattr(args, option))]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(place)} if args.gpus > 1 else {})
        subprocess.run(command, stdout=out, check=True, env=environment)
        out.seek(0)
        return json.loads(out.read().splitlines()[-1])


def train(variant: str, args) -> tuple[Llama, dict]:
    """The trained model, and what is to be said of the run."""
    run, backend = Training(args), backend_of(variant)
    layers = run.model.layers
    quantised = len(layers) - (len(layers) // 4 if variant.endswith("-last_bf16") else 0)
    compile_with(backend, run.model, quantised)
    start, switch = time.monotonic(), args.steps
    if variant.endswith("-forward_bf16"):
        switch = args.steps * 4 // 5
    run.advance(switch)
    if switch < args.steps:
        compile_with(fp4compile.backend(backend.recipe.replace(**FORWARD_BF16), strict=True), run.model, quantised)
        run.advance(args.steps)
    share = None if isinstance(backend, str) else 100 * backend.report.flops_share() * quantised / len(layers)
    return run.model, {
        "losses": [round(value, 5) for value in run.losses], "seconds": time.monotonic() - start,
        "quantised": share, "parameters": sum(p.numel() for p in run.model.parameters()),
    }  # fmt: skip


class Training:
    """A model of a seed, its optimiser and schedule, and the losses of its steps so far."""

    def __init__(self, args):
        torch.manual_seed(args.seeds[0])
        self.args, self.losses = args, []
        self.model = model_of(args.shape).to(args.device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=args.rate, betas=(0.9, 0.95), fused=args.device != "cpu"
        )
        warmup = args.steps // 20 + 1
        parts = [
            torch.optim.lr_scheduler.LinearLR(self.optimiser, 0.01, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(self.optimiser, args.steps, eta_min=args.rate / 10),
        ]
        self.schedule = torch.optim.lr_scheduler.SequentialLR(self.optimiser, parts, milestones=[warmup])

    def advance(self, last: int) -> None:
        """Train until so many steps are done."""
        first, losses = len(self.losses), []
        for step, tokens in enumerate(batches(self.args, first, last - first), first):
            loss = loss_of(self.model, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad()
            self.schedule.step()
            losses.append(loss.detach())
            if step % 100 == 0:
                print(f"step {step} loss {loss.item():.3f}", file=sys.stderr)
        self.losses += torch.stack(losses).tolist()

    def state(self) -> dict:
        """What a later `restore` goes back to."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimiser", "schedule")}
        return copy.deepcopy({**parts, "losses": self.losses})

    def restore(self, state: dict) -> None:
        for name in ("model", "optimiser", "schedule"):
            getattr(self, name).load_state_dict(copy.deepcopy(state[name]))
        self.losses = list(state["losses"])


def model_of(name: str) -> Llama:
    """The model of a shape's name, with random weights."""
    model = Llama(SHAPES[name])
    if name in EXPERTS:
        for block in model.layers:
            block.mlp = ExpertsMLP(SHAPES[name], EXPERTS[name])
    return model


def backend_of(variant: str):
    if variant.startswith("bf16"):
        return "eager" if variant == "bf16-uncompiled" else "inductor"
    return fp4compile.backend(recipe_of(variant), strict=True)


def recipe_of(variant: str) -> Recipe:
    """The recipe of a variant's name, each of its switches turned."""
    name, *switches = variant.split("-")
    recipe = named(name)
    for switch in switches:
        recipe = recipe.replace(**SWITCHES.get(switch, {}))
    return recipe


def compile_with(backend, model: Llama, quantised: int) -> None:
    """Compile the blocks, the first so many of them with the backend; the head too, where its recipe has the head."""
    for index, block in enumerate(model.layers):  # they share one graph, which is compiled once
        block.compile(backend=backend if index < quantised else "inductor")
    if not isinstance(backend, str) and not backend.recipe.skip_lm_head:
        # A report of its own: that of the blocks says what share of them is quantised. Not `compile`, which passes by
        # the forward of PyTorch's own modules.
        apart = fp4compile.backend(backend.recipe, strict=True)
        model.lm_head.forward = torch.compile(model.lm_head.forward, backend=apart)


def batches(args, first: int, count: int) -> Iterator[torch.Tensor]:
    """Batches of sequences, one token longer than the model's, in the order of the seed; no sequence comes twice."""
    length = SHAPES[args.shape].length
    data = torch.from_numpy(numpy.load(args.tokens)).to(args.device)
    order = torch.randperm((len(data) - 1) // length, generator=torch.Generator().manual_seed(args.seeds[0] + 1))
    if len(order) < (first + count) * args.batch:
        raise ValueError(f"{first + count} batches of {args.batch}: the text has {len(order)} sequences of {length}")
    window = torch.arange(length + 1, device=args.device)
    for place in range(first, first + count):
        starts = length * order[place * args.batch :][: args.batch, None]
        yield data[starts.to(args.device) + window].long()


def loss_of(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def encode(path: Path, vocabulary: int, most: int) -> None:
    """Write the tokens of the docstrings of up to so many of the sources installed here, int16, in a random order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({file for root in roots for file in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    with ProcessPoolExecutor() as pool:
        texts = pool.map(prose, files[:most], chunksize=64)
        paragraphs = list(dict.fromkeys(itertools.chain.from_iterable(texts)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokens = [encoding.ids for encoding in tokenizer.encode_batch_fast(paragraphs)]
    numpy.save(path, numpy.concatenate([numpy.array(ids, dtype=numpy.int16) for ids in tokens]))


def prose(file: Path) -> list[str]:
    """The paragraphs of a source's docstrings; none of a file that is no Python."""
    warnings.simplefilter("ignore")
    try:
        tree = ast.parse(file.read_text(errors="replace"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return [paragraph.strip() + "\n\n" for text in texts for paragraph in text.split("\n\n") if paragraph.strip()]


def plot(runs: dict[str, dict], path: Path) -> None:
    """Losses, averaged over the last 50 steps, and their distance from bf16."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True)
    smooth = {name: torch.tensor(run["losses"]).unfold(0, TAIL, 1).mean(-1) for name, run in runs.items()}
    above = {name: 100 * (curve / smooth["bf16"] - 1) for name, curve in smooth.items() if "bf16" in smooth}
    for i, (name, curve) in enumerate(smooth.items()):
        steps = range(TAIL, TAIL + len(curve))
        top.plot(steps, curve, f"C{i}", label=name)
        if name in above and name != "bf16":
            bottom.plot(steps, above[name], f"C{i}", label=name)
    later = [curve[len(curve) // 10 :].max().item() for curve in above.values()]  # the first steps are far apart
    top.set(ylabel=f"loss, mean of {TAIL} steps", yscale="log")
    bottom.set(ylabel="% above bf16", xlabel="step", ylim=(-2, 1.05 * max(6, *later)))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
