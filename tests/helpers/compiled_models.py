"""Small models that are compiled for a GPU that is not there, run in the simulator, and compared with the reference.

`compared(case)` runs a model three times from the same weights, inputs and seeds:

- *simulated*: the wrapper that Inductor generates for the GPU (`simulated_gpu`);
- *reference*: the graph on the CPU, op by op; every op rounds its result to the model's dtype. In float32 it is the
  graph of the plain ops, so that the fusing passes are proven as well. In bfloat16 it is the graph that the GPU gets,
  with prologues and epilogues fused: a prologue and its quantiser are one op, which rounds where the kernel does;
- *exact* (for bfloat16): the graph of the plain ops in float32.

How far simulated and reference may be apart:

- In float32 both compute the same operations, in sums of another order. At most `ROUNDINGS` numbers are added on the
  way from the inputs to a result; their rounding errors add up as a random walk. The bound is four of its standard
  deviations, relative to a tensor's largest element: an error is evenly distributed up to 2^-24 of a partial sum, whose
  square is on average half of the result's. One other code of one weight makes more than twice the bound.
- In bfloat16 Inductor's own kernels round where they write to memory, and the reference after every operation. Codes
  differ where a value lies near the boundary of two. What rounds at some of the places only is as far from exact as
  what rounds at all of them, or nearer. So simulated and reference are at most twice as far apart, in the norm of a
  tensor, as reference and exact. The loss is one number, which may be exact by chance: its bound is one rounding of
  bfloat16.
"""

import copy
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp4compile
from fp4compile import config
from fp4compile.formats import reference
from fp4compile.hardware import Target
from fp4compile.templates.launch import dry_run
from tests.helpers import without_codegen
from tests.helpers.llama import llama_norm
from tests.helpers.simulated_gpu import simulated

ROUNDINGS = 16 * 400  # products in a row, forward and backward, times terms of a sum
BOUND = 4 * (ROUNDINGS / 3 / 2) ** 0.5 * 2.0**-24
SEED = 5  # of the seeds of stochastic rounding


class Mlp(nn.Module):
    """Sizes that are no multiples of a block, of what the library takes, or of a tile."""

    one_token, forty_rows = (1, 200), (40, 200)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(200, 328), nn.Linear(328, 200)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class LlamaBlock(nn.Module):
    """Two heads of queries for each head of keys; rotary embeddings; SwiGLU."""

    one_token, forty_rows = (1, 1, 128), (2, 20, 128)

    def __init__(self, hidden=128, heads=4, kv_heads=2, inner=208):
        super().__init__()
        self.width = hidden // heads
        keys = kv_heads * self.width
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden), (hidden, inner),
                          (hidden, inner), (inner, hidden))
        )  # fmt: skip
        self.norm, self.post_norm = (nn.Parameter(1 + torch.randn(hidden) / 8) for _ in range(2))

    def forward(self, x):
        y = llama_norm(x, self.norm)
        q, k, v = (layer(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = llama_norm(x, self.post_norm)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x):
    """Rotary embeddings of x [batch, heads, tokens, width]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, target):
        return F.mse_loss(self.model(x).float(), target)


MODELS = {"MLP": Mlp, "Llama block": LlamaBlock}
RUNS = ("one token", "40 rows", "training step of 40 rows")
RECIPES = ("nvfp4", "mxfp8", "nvfp4_train")


@dataclass(frozen=True)
class Case:
    """A model, a recipe and what is run. sm: the GPU's compute capability, 100 for 10.0."""

    model: str
    recipe: str
    run: str
    dtype: torch.dtype
    sm: int = 100

    @property
    def trains(self) -> bool:
        return self.run == RUNS[2]

    def made(self):
        """(the model, its input, the target of its loss)."""
        torch.manual_seed(0)
        model = MODELS[self.model]().to(self.dtype)
        shape = model.one_token if self.run == RUNS[0] else model.forty_rows
        return model, torch.randn(shape, dtype=self.dtype), torch.randn(shape)

    def __str__(self):
        return f"{self.model}, {self.recipe}, {self.run}, {str(self.dtype).removeprefix('torch.')}, {self.sm}"


CASES = [Case(model, recipe, run, dtype) for model in MODELS for recipe in RECIPES for run in RUNS
         for dtype in (torch.bfloat16, torch.float32)]  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """Of one tensor, how far simulated and reference are apart, and how far they may be."""

    name: str
    found: float
    bound: float


@dataclass(frozen=True)
class Compared:
    """launches: how many there were of each kind ("package", "Inductor", "library", "PyTorch"), by name.

    instructions: of warps. seconds: of a CPU, for all of it.
    """

    case: Case
    launches: dict[str, Counter]
    instructions: int
    seconds: float
    differences: list[Difference]

    @property
    def largest(self) -> Difference:
        """The one that is nearest to its bound, or farthest beyond."""
        return max(self.differences, key=lambda each: each.found / each.bound)


def compared(case: Case) -> Compared:
    """Run a case, and compare."""
    started = time.process_time()
    model, x, target = case.made()
    with pytest.MonkeyPatch.context() as patch, simulated(patch, case.sm) as gpu:
        found = results(case, model, x, target)
    plain = case.dtype == torch.float32
    expected = expected_of(case, model, x, target, fused=not plain)
    exact = None if plain else expected_of(case, model.float(), x.float(), target)
    differences = [
        difference(name, found[name], expected[name], None if exact is None else exact[name]) for name in expected
    ]
    return Compared(case, gpu.counted(), gpu.simulator.tally.instructions, time.process_time() - started, differences)


def expected_of(case, model, x, target, fused=False) -> dict[str, torch.Tensor]:
    """What the reference gives, by name. fused: of the graph with the prologues and epilogues that the GPU gets.

    Only SM100 rounds stochastically by an instruction, of eight random bits.
    """
    random = reference.eight_random_bits if Target(case.sm).isa == 100 else nullcontext
    with pytest.MonkeyPatch.context() as patch, random():
        if fused:
            without_codegen.install(patch, _Seeds, deciding=lambda: dry_run(Target(case.sm)))
            patch.setattr(config, "disabled_passes", ("inplace", "lower"))
        else:
            without_codegen.install(patch, _Seeds)
        return results(case, model, x, target)


def results(case, model, x, target) -> dict[str, torch.Tensor]:
    """What a compiled model gives, by name: the result, or the loss and all gradients."""
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model, backend = copy.deepcopy(model), fp4compile.backend(case.recipe)
    if not case.trains:
        with torch.no_grad():
            return {"result": torch.compile(model, backend=backend, fullgraph=True)(x)}
    x = x.clone().requires_grad_()
    loss = torch.compile(WithLoss(model), backend=backend, fullgraph=True)(x, target)
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad} | {name: each.grad for name, each in model.named_parameters()}


def difference(name, found, expected, exact) -> Difference:
    """See the top of this file."""
    found, expected = found.double(), expected.double()
    if exact is None:
        return Difference(name, ((found - expected).abs().max() / expected.abs().max()).item(), BOUND)
    norm = expected.norm()
    bound = 2 * ((expected - exact.double()).norm() / norm).item() if expected.dim() else 2.0**-8
    return Difference(name, ((found - expected).norm() / norm).item(), bound)


class _Seeds(TorchDispatchMode):
    """Seeds as Inductor's code draws them, from all numbers of 64 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prims.inductor_seeds.default:
            limits = torch.iinfo(torch.int64)
            return torch.randint(limits.min, limits.max, [args[0]])
        return func(*args, **(kwargs or {}))
