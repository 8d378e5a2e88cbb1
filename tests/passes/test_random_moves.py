"""Random chains of moves and quantisers on three ranks: quantising before the moves keeps every bit of all results.

The oracle is the same graph before the passes, which quantises behind the moves.
"""

import random
from collections import Counter

import pytest
import torch

from fp4compile.passes import quantize_before_index as tested
from fp4compile.passes.quantize_before_gather import quantize_before_gather
from tests.helpers.ranks_in_step import run, same_bits, traced

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RANKS = 3
FORMATS = ("mxfp8", "mxfp4", "mxfp8_32x32", "nvfp4", "nvfp4_te", "nvfp4_one_level", "nvfp4_rowwise", "float8_rowwise")


def gather(rng, x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), RANKS, "0"))


def sequences(rng, x):
    """Each rank has a part of each sequence."""
    count = rng.choice((1, 2, 4))
    if len(x) % count:
        return x
    rows = gather(rng, x.reshape(count, -1, x.shape[-1]))
    return aten.cat(list(aten.split(rows, count)), 1).view(-1, x.shape[-1])


def index(rng, x):
    rows = aten.arange(rng.choice((1, 2)) * len(x))
    return aten.index.Tensor(x, [(rows * rng.choice((1, 5, 7)) + rng.randrange(9)) % len(x)])


def reshape(rng, x):
    return aten.clone(x.view(1, *x.shape)).view(x.shape)


STEPS = (gather, gather, sequences, index, reshape)


def program(seed):
    """(function of a rank's rows, their number, their width)."""
    rng = random.Random(seed)
    rows, width = rng.choice((16, 32, 48, 20)), rng.choice((32, 64, 80))
    steps, drawn = rng.choices(STEPS, k=rng.randint(1, 3)), rng.random()

    def function(x):
        own = random.Random(drawn)
        for step in steps:
            x = step(own, x)
        results = []
        for _ in range(own.randint(1, 3)):
            results += quantised(own, x if own.random() < 0.8 else index(own, x))
        return *results, *([x.sum(-1)] if own.random() < 0.1 else [])

    return function, rows, width


def quantised(rng, x):
    """The results that are there."""
    options = {"layout": rng.choice(("linear", "swizzled"))}
    fmt, dim = rng.choice(FORMATS), rng.choice(([-1], [-1], [-1], [-2], [-1, -2]))
    if rng.random() < 0.5 and fmt == "nvfp4":
        options["outer"] = aten.full([], 0.01)
    return [each for each in torch.ops.fp4compile.quantize(x, fmt, dim, **options) if each.shape != (0,)]


def shards(rows, width):
    """Rows of which the last rank has the largest, and some are NaN or zeros."""
    each = torch.randn(RANKS, rows, width, generator=torch.Generator().manual_seed(0))
    each *= 2.0 ** torch.arange(RANKS * rows).fmod(11).view(RANKS, rows, 1)
    each[-1] *= 37
    each[1, 1::7] = 0
    each[0, 3, 2] = float("nan")
    return [(one,) for one in each.bfloat16()]


@pytest.fixture(autouse=True)
def every_move_pays(monkeypatch):
    monkeypatch.setattr(tested, "_inductor_moves", lambda quantise: True)
    monkeypatch.setattr(tested, "_in_memory", lambda node: True)


def test_random_moves():
    moved = Counter()
    for seed in range(100):
        function, *size = program(seed)
        values = shards(*size)
        graph = traced(function, values[0])
        expected = run(graph, values)
        moved["gather"] += quantize_before_gather(graph)
        moved["index"] += tested.quantize_before_index(graph)
        graph.lint()
        for rank, (mine, wanted) in enumerate(zip(run(graph, values), expected, strict=True)):
            assert all(map(same_bits, mine, wanted)), f"seed {seed}, rank {rank}"
    assert min(moved.values()) >= 20, moved
