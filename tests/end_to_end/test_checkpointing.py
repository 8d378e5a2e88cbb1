"""Activation checkpointing, whole blocks and by a policy: the same gradients, and nothing kept that bf16 would not."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp4compile
from tests.helpers import idle_kernels, without_codegen
from tests.helpers.graphs import Keeping

pytestmark = pytest.mark.slow
RECIPES = ["mxfp8", "nvfp4_train"]
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


class Block(nn.Module):
    def __init__(self, width=64, hidden=128):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = torch.tanh(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def all_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class EverySecondProduct:
    def __init__(self):
        self.seen = {True: 0, False: 0}

    def __call__(self, context, op, *args, **kwargs):
        if op not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.seen[context.is_recompute] += 1
        odd = self.seen[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE


def every_second_product():
    return create_selective_checkpoint_contexts(EverySecondProduct())


CONTEXTS = {
    "nothing": {},
    "all products": {"context_fn": functools.partial(create_selective_checkpoint_contexts, all_products)},
    "every second product": {"context_fn": every_second_product},
}


@functools.cache
def train(backend, dtype, saving):
    """(bytes kept between forward and backward, a function that returns the gradients) of one step of two blocks.
    saving: what a checkpointed block keeps, or None for no checkpointing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()]).to(dtype)
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)

    def forward(x):
        for block in blocks:
            x = block(x) if saving is None else checkpoint(block, x, use_reentrant=False, **CONTEXTS[saving])
        return x

    if backend != "inductor":
        backend = fp4compile.backend(backend, strict=True)
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    with Keeping() as keeping:
        y = compiled(x)
    kept = keeping.size([*blocks.parameters(), x])

    @functools.cache
    def gradients():  # Inductor compiles the backward when it is called, which may be much later
        torch.manual_seed(1)
        return torch.autograd.grad(y.square().mean(), [x, *blocks.parameters()])

    return kept, gradients


# In float32: elsewhere Inductor rounds where its loops end, and checkpointing moves that.
@pytest.mark.parametrize(("name", "saving"), [("mxfp8", "every second product"), ("nvfp4_train", "nothing")])
def test_gradients_are_those_without_checkpointing(name, saving, monkeypatch):
    if name == "mxfp8":
        without_codegen.install(monkeypatch)  # the other one has Inductor's code, and seeds
    plain, checkpointed = train(name, torch.float32, None), train(name, torch.float32, saving)
    assert checkpointed[0] < plain[0]
    assert all(map(torch.equal, checkpointed[1](), plain[1]()))


@pytest.mark.parametrize(("name", "saving"), [
    ("mxfp8", "every second product"), ("nvfp4_train", "nothing"), ("nvfp4_train", "all products"),
])  # fmt: skip
def test_no_more_is_kept_than_in_bf16(name, saving):
    """Outputs of products, as the policy says, and the second block's input. Without checkpointing it is less:
    `test_what_lives_from_forward_to_backward_is_packed`."""
    with idle_kernels.compute_nothing():
        plain, quantised = (train(each, torch.bfloat16, saving)[0] for each in ("inductor", name))
    assert quantised == plain


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_around_compiled_blocks(name, monkeypatch):
    if name == "mxfp8":
        without_codegen.install(monkeypatch)
    block, backend = Block(), fp4compile.backend(name, strict=True)
    compiled = torch.compile(block, backend=backend)
    x = torch.randn(64, 64, requires_grad=True)

    def gradients(call):
        torch.manual_seed(1)
        return torch.autograd.grad(call(x).square().mean(), [x, *block.parameters()])

    again = gradients(lambda x: checkpoint(compiled, x, use_reentrant=False))
    assert all(map(torch.equal, again, gradients(compiled)))
