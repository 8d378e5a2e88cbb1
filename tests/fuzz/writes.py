"""Random sequences of writes to weights: after each, what the weight cache returns is what quantising now gives.

A sequence has a model of two layers and an embedding, forms of their weights, and a pool of other tensors on the
weights' memory, to which it may write much later. Each write is one that programs make: PyTorch's operations, `.data`,
optimisers, averages of weights, loaders, merges of adapters, collectives, assignments, swaps.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import fp4compile
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.weights import cache
from fp4compile.weights.cache import Form, Piece, form, packed_weight
from fp4compile.weights.sharing import same_bits
from fp4compile.weights.writes import watch
from tests.helpers.cached_weights import write_unseen
from tests.helpers.process_groups import alone

ROWS, COLUMNS = 32, 32
PIECE = Piece((16, COLUMNS), (COLUMNS, 1), 16 * COLUMNS, ())
FORMS = (form("mxfp8"), form("nvfp4", 0), form("mxfp8", piece=PIECE))


@dataclass
class Sequence:
    """A sequence under way.

    rng: decides everything. model: its weights are watched. pool: other tensors on the weights' memory, or that may
    come there. averaged: a running average of the model, None before the first.
    """

    rng: random.Random
    model: nn.Module
    pool: list[torch.Tensor] = field(default_factory=list)
    averaged: AveragedModel | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that are quantised: those with the sizes that the forms take."""
        return [one for one in self.model.parameters() if one.shape == (ROWS, COLUMNS)]

    def weight(self) -> nn.Parameter:
        return self.rng.choice(self.weights)

    def values(self) -> torch.Tensor:
        return torch.randn(ROWS, COLUMNS) * self.rng.choice((0.5, 1.0, 3.0))

    def change(self, tensor: torch.Tensor) -> None:
        """Write to a tensor, or to a part of it, by an operation of PyTorch."""
        with self.rng.choice((torch.no_grad, torch.inference_mode))():
            self.rng.choice(CHANGES)(tensor)


CHANGES: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda t: t.mul_(-1.5),
    lambda t: t.add_(torch.ones_like(t)),
    lambda t: t.copy_(torch.randn_like(t)),
    lambda t: t.__setitem__(0, 3.0),
    lambda t: t[-1:].mul_(-2),
    lambda t: t.view(-1)[:8].fill_(1.25) if t.is_contiguous() else t.neg_(),
    lambda t: t.t().mul_(-0.5) if t.dim() == 2 else t.neg_(),
    lambda t: t.detach().sub_(1),
    lambda t: torch._foreach_mul_([t], -1.25),
    lambda t: torch._foreach_copy_([t], [torch.randn_like(t)]),
    lambda t: torch.add(t, 1, out=t),
    lambda t: nn.init.normal_(t),
)


# ---------------------------------------------------------------- writes

WRITES: dict[str, Callable[[Sequence], object]] = {}


def write(function: Callable[[Sequence], object]) -> Callable[[Sequence], object]:
    """Register a kind of write."""
    WRITES[function.__name__] = function
    return function


@write
def operation(s: Sequence) -> None:
    weight = s.weight()
    if not weight.is_inference():
        s.change(weight)


@write
def through_data(s: Sequence) -> None:
    s.change(s.weight().data)


@write
def data_of_data(s: Sequence) -> None:
    s.change(s.weight().detach().data.data)


@write
def data_augmented(s: Sequence) -> None:
    """What merges of adapters do: `.data` is read, written to, and assigned."""
    weight = s.weight()
    if s.rng.random() < 0.5:
        weight.data += torch.randn_like(weight.data)
    else:
        weight.data *= -1.5


@write
def data_assigned(s: Sequence) -> None:
    weight = s.weight()
    weight.data = s.values().to(weight.dtype)


@write
def data_swapped(s: Sequence) -> None:
    one, other = s.weight(), s.weight()
    one.data, other.data = other.data, one.data


@write
def kept_for_later(s: Sequence) -> None:
    """Another tensor on a weight's memory, which nobody writes to yet."""
    weight = s.weight()
    take = s.rng.choice((
        lambda w: w.data, lambda w: w.data[3:], lambda w: w.data.t(), lambda w: w.data.detach(), lambda w: w.detach(),
        lambda w: w.detach().data, lambda w: nn.Parameter(w.data, requires_grad=False), lambda w: w.data.view(-1)[5:9],
    ))  # fmt: skip
    s.pool.append(take(weight))


@write
def to_what_was_kept(s: Sequence) -> None:
    if s.pool:
        s.change(s.rng.choice(s.pool))


@write
def part_of_a_buffer(s: Sequence) -> None:
    """A weight becomes a part of a longer tensor, to which the sequence may write later."""
    weight, flat = s.weight(), torch.randn(3, ROWS, COLUMNS)
    weight.data = flat[1].to(weight.dtype)
    s.pool.append(flat if weight.dtype == flat.dtype else weight.data)


@write
def backup_and_restore(s: Sequence) -> None:
    """Shadow weights as many training scripts keep them."""
    weight = s.weight()
    backup = weight.data
    shadow = s.values().to(weight.dtype)
    weight.data = shadow
    s.pool.append(shadow)
    check(s)
    if s.rng.random() < 0.5:
        weight.data = backup


@write
def kept_assigned(s: Sequence) -> None:
    """A tensor that was kept for later becomes the weight's memory."""
    weight = s.weight()
    fitting = [one for one in s.pool if one.shape == weight.shape and one.dtype == weight.dtype and one.is_contiguous()]
    if fitting:
        weight.data = s.rng.choice(fitting)


class Stepping(torch.optim.Optimizer):
    """An optimiser of another library, whose kernel PyTorch does not know."""

    def __init__(self, parameters: Iterator[nn.Parameter]):
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                write_unseen(one, -0.75)


OPTIMISERS: tuple[Callable[[list], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.5, foreach=False),
    lambda p: torch.optim.Adagrad(p, lr=0.5),
    Stepping,
)


@write
def optimiser(s: Sequence) -> None:
    parameters = [one for one in s.weights if one.dtype == torch.float32 and not one.is_inference()]
    if parameters:
        for one in parameters:
            one.requires_grad_(True).grad = torch.randn_like(one)
        s.rng.choice(OPTIMISERS)(parameters).step()


@write
def averages(s: Sequence) -> None:
    """An average of the weights, which is copied back now and then."""
    if any(one.is_inference() for one in s.model.parameters()):
        return
    count = len(list(s.model.parameters()))  # a tied weight may have become two
    if s.averaged is None or len(list(s.averaged.module.parameters())) != count:
        s.averaged = AveragedModel(s.model)
    s.averaged.update_parameters(s.model)
    if s.rng.random() < 0.5:
        for one, mean in zip(s.model.parameters(), s.averaged.module.parameters(), strict=True):
            one.data.copy_(mean.data)


@write
def swapped(s: Sequence) -> None:
    weight = s.weight()
    torch.utils.swap_tensors(weight, nn.Parameter(s.values().to(weight.dtype)))


@write
def replaced(s: Sequence) -> None:
    layer = s.rng.choice((s.model[1], s.model[2]))
    layer.weight = nn.Parameter(s.values())


@write
def loaded(s: Sequence) -> None:
    state = {name: torch.randn_like(value) for name, value in s.model.state_dict().items()}
    s.model.load_state_dict(state, assign=s.rng.random() < 0.5)


@write
def state_written(s: Sequence) -> None:
    """What federated learning and old averages do: a state dict's values are written to, often through `.data`."""
    value = s.rng.choice(list(s.model.state_dict().values()))
    s.change(value.data if s.rng.random() < 0.5 else value)


@write
def vector(s: Sequence) -> None:
    if len({one.dtype for one in s.model.parameters()}) == 1:
        values = parameters_to_vector(s.model.parameters()).detach() * -0.5
        vector_to_parameters(values, s.model.parameters())
        s.pool.append(values)


@write
def cast(s: Sequence) -> None:
    s.model.to(s.rng.choice((torch.bfloat16, torch.float32)))


@write
def set_(s: Sequence) -> None:
    weight = s.weight()
    if not weight.is_inference():
        with torch.no_grad():
            weight.set_(s.values().to(weight.dtype))


@write
def broadcast(s: Sequence) -> None:
    """A collective writes without a trace, while there is a group."""
    with alone():
        weight = s.weight()
        dist.broadcast(weight.detach(), 0)
        write_unseen(weight, -1.5)
        check(s)
        write_unseen(weight, -1.5)
        check(s)


@write
def unseen_and_told(s: Sequence) -> None:
    weight = s.weight()
    write_unseen(weight, -1.25)
    fp4compile.refresh(s.rng.choice((weight, s.model, None)))


@write
def copied(s: Sequence) -> None:
    """The sequence goes on with a copy of the model; the pool is still on the memory of the first."""
    s.model = copy.deepcopy(s.model)
    s.averaged = None


@write
def frozen_or_not(s: Sequence) -> None:
    s.weight().requires_grad_(s.rng.random() < 0.5)


# ---------------------------------------------------------------- sequences


def start(seed: int) -> Sequence:
    """The sequence of a seed before its first write. One of two has a tied weight."""
    watch()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS), nn.Linear(COLUMNS, ROWS, bias=False))
    if rng.random() < 0.5:
        model[2].weight = model[0].weight
    return Sequence(rng, model)


def stale(weight: torch.Tensor, packed_as: Form) -> bool:
    """Whether the cache's codes are not those of the weight as it is."""
    source = weight.detach() if packed_as.piece is None else packed_as.piece.of(weight.detach())
    now = QUANTIZE(source, packed_as.format, packed_as.dim)
    kept = packed_weight(weight, packed_as)
    return not all(same_bits(one, other) for one, other in zip(kept, now, strict=True))


def check(s: Sequence) -> None:
    """Raises AssertionError where the cache returns codes of older weights."""
    for weight in s.weights:
        for packed_as in FORMS:
            if stale(weight, packed_as):
                raise AssertionError(f"{packed_as.format} along {packed_as.dim}")


def run(seed: int, length: int = 12) -> str | None:
    """The writes of a sequence up to the one after which a packed weight was stale; None where none was."""
    s, done = start(seed), []
    for _ in range(length):
        if s.rng.random() < 0.9:  # otherwise the next write comes before a call
            try:
                check(s)
            except AssertionError as error:
                return f"sequence {seed}: {' -> '.join(done)}: {error}"
        name = s.rng.choice(list(WRITES))
        done.append(name)
        try:
            WRITES[name](s)
        except AssertionError as error:
            return f"sequence {seed}: {' -> '.join(done)}: {error}"
    return None


def search(first: int, count: int) -> int:
    """Run sequences, print what was stale, and return how many were."""
    packings, quantize = 0, cache._quantize

    def counting(*given):
        nonlocal packings
        packings += 1
        return quantize(*given)

    cache._quantize = counting
    findings = [finding for seed in range(first, first + count) if (finding := run(seed)) is not None]
    cache._quantize = quantize
    print(*findings, f"{count} sequences, {packings} packings, {len(findings)} stale", sep="\n")
    return len(findings)
