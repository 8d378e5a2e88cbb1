"""What goes wrong in a training run: NaN gradients, skipped steps, a killed process, two threads."""

import functools
import signal
import threading

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

import fp4compile
from fp4compile import dynamo_backend
from fp4compile.formats import formats
from fp4compile.recipe import named
from tests.helpers import resume_worker, without_codegen
from tests.helpers.programs import Program

pytestmark = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = ["mxfp8", "mxfp8_32x32", "nvfp4", "nvfp4_rowwise", "nvfp4_train", "float8_rowwise"]

# ---------------------------------------------------------------- a gradient that is no number

ROW, COLUMN = 37, 50  # of the gradient that is spoilt: [tokens, out features]


def gradients(spoil, first, second, x):
    """(dx, gradients of the first layer, of the second), `spoil` having had the gradient between the two."""
    layers = (first._orig_mod, second._orig_mod)
    for layer in layers:
        layer.zero_grad()
    x = x.clone().requires_grad_()
    between = first(x)
    between.register_hook(spoil)
    second(between).square().sum().backward()
    return x.grad, *([p.grad.clone() for p in layer.parameters()] for layer in layers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_spoilt_gradient_shows_and_stays_where_it_is(name, device, monkeypatch):
    """In the gradients of the layer that it reaches and of those before it; not behind, and not in the next step.

    Where blocks or rows have scales of their own, it spoils its token and its feature alone. A scale of the whole
    tensor is spoilt with it, and all that is scaled by it; but contract `te` leaves that scale out where it would be
    infinite, and the rest is quantised without it.
    """
    if device == "cpu" and not named(name).stochastic_rounding:
        without_codegen.install(monkeypatch)  # Inductor's code draws the seeds
    backend = fp4compile.backend(name, strict=True)
    layers = nn.Linear(64, 96).to(device), nn.Linear(96, 64).to(device)
    compiled = [torch.compile(layer, backend=backend) for layer in layers]
    x = torch.randn(80, 64, device=device)

    def spoil(gradient, bad):
        gradient = gradient.clone()
        gradient[ROW, COLUMN] = bad
        return gradient

    state = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    clean = gradients(torch.clone, *compiled, x)
    fmt = formats.get(named(name).dgrad_dy)  # that of wgrad, too
    for bad in (torch.nan, torch.inf):
        torch.set_rng_state(state[0])
        if device == "cuda":
            torch.cuda.set_rng_state(state[1])
        dx, (dw, db), behind = gradients(functools.partial(spoil, bad=bad), *compiled, x)
        finite = fmt.contract == "te" and bad == torch.inf
        rest = "as clean" if fmt.outer != "tensor" else "finite" if finite else "spoilt"
        check_rows(dx, clean[0], ROW, rest)
        check_rows(dw, clean[1][0], COLUMN, rest)
        check_rows(db[:, None], clean[1][1][:, None], COLUMN, "as clean")
        assert all(map(torch.equal, behind, clean[2]))
    torch.manual_seed(1)
    again = gradients(torch.clone, *compiled, x)
    torch.manual_seed(1)
    expected = gradients(torch.clone, *compiled, x)
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(again), torch.utils._pytree.tree_leaves(expected)))
    assert all(tensor.isfinite().all() for tensor in torch.utils._pytree.tree_leaves(again))


def check_rows(actual, clean, row, rest):
    """Nothing of the row is finite; the other rows are as `rest` says."""
    others = actual[torch.arange(len(actual)) != row]
    assert not actual[row].isfinite().any() and clean.isfinite().all()
    if rest == "as clean":
        assert torch.equal(others, clean[torch.arange(len(actual)) != row])
    else:
        assert (others.isfinite() == (rest == "finite")).all()


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "float8_rowwise"])
def test_inductors_checks_find_a_nan_and_nothing_else(recipe):
    """TORCHINDUCTOR_NAN_ASSERTS=1 asked codes and scales for infinities, which their dtypes do not have."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    with inductor.patch(nan_asserts=True):
        compiled = torch.compile(layer, backend=fp4compile.backend(recipe))
        with torch.no_grad():
            compiled(x)
        compiled(x).sum().backward()
        for wrong in (torch.nan, torch.inf):
            with pytest.raises(AssertionError), torch.no_grad():
                compiled(torch.full_like(x, wrong))


# ---------------------------------------------------------------- a step that the grad scaler skips


def scaled_training(backend, device, overflow=None, skip=None):
    """(losses, losses on the first batch under no_grad after each step, the scaler's last scale), of six steps.

    In step `overflow` one gradient of the output is infinite. Step `skip` is left out by hand: neither the optimizer
    nor the scaler sees it. The layers have no bias, so the scaler sees quantised gradients alone: it skips a step only
    if the infinity comes through the quantisers.
    """
    torch.manual_seed(0)
    layers = nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)
    model = nn.Sequential(*layers).to(device)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    batches = torch.randn(6, 32, 64, generator=torch.Generator().manual_seed(1)).to(device)

    def loss_of(x, spoil=False):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = compiled(x)
        if spoil:
            y.register_hook(spoilt)
        return (y.float() - x.sin()).square().mean()

    losses, evaluated = [], []
    for step, x in enumerate(batches):
        loss = loss_of(x, spoil=step == overflow)
        scaler.scale(loss).backward()
        if step == overflow:
            assert not any(parameter.grad.isfinite().all() for parameter in model.parameters())
        if step != skip:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            evaluated.append(loss_of(batches[0]).item())
    return losses, evaluated, scaler.get_scale()


def spoilt(gradient):
    gradient = gradient.clone()
    gradient[5, 9] = torch.inf
    return gradient


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["nvfp4_train"])  # of the states that a step has, this recipe has all
def test_a_skipped_step_leaves_no_trace(name, device):
    backend = fp4compile.backend(name, strict=True)
    losses, evaluated, scale = scaled_training(backend, device, overflow=3)
    assert scale == 2.0**15, "the scaler saw the infinite gradients and halved its scale"
    # Scales of the loss are powers of two: the one that the scaler backs off to changes no bit.
    assert (losses, evaluated, 2.0**16) == scaled_training(backend, device, skip=3)
    assert evaluated[2] == evaluated[3] and len(set(evaluated)) == 5


# ---------------------------------------------------------------- killed and resumed


def test_all_graphs_of_a_repeatable_run_are_compiled_as_such(tmp_path, monkeypatch):
    """Dynamo resets Inductor's own setting between the forward and the backward graph."""
    seen, compile_inner = [], dynamo_backend.compile_fx_inner

    def noted(*args, **kwargs):
        seen.append((kwargs.get("is_backward", False), inductor.deterministic))
        return compile_inner(*args, **kwargs)

    monkeypatch.setattr(dynamo_backend, "compile_fx_inner", noted)
    monkeypatch.setattr(resume_worker, "STEPS", 1)
    resume_worker.train("mxfp8", "cpu", tmp_path / "checkpoint.pt", tmp_path / "losses.txt")
    assert seen == [(False, True), (True, True)]
    assert not inductor.deterministic, "the setting ends with the run"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["nvfp4_train"])  # rounds stochastically: the random state is resumed as well
def test_killed_and_resumed_gives_the_same_losses(name, device, tmp_path):
    def files(case):
        return tmp_path / f"{case}.pt", tmp_path / f"{case}.txt"

    resume_worker.train(name, device, *files("whole"))  # in this process: one start of Python less
    expected = files("whole")[1].read_text().splitlines()
    checkpoint, out = files("killed")
    command = [resume_worker.__file__, name, device, str(checkpoint), str(out)]
    done = Program([*command, "3"], tmp_path).ended()
    assert done.status == -signal.SIGKILL, done.said
    assert out.read_text().splitlines() == expected[:3]
    done = Program(command, tmp_path).ended()
    assert done.status == 0, done.said
    # Step 2 came after the last checkpoint and is done again.
    assert out.read_text().splitlines() == [*expected[:3], *expected[2:]]
    assert len(set(expected)) == resume_worker.STEPS


# ---------------------------------------------------------------- two threads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["nvfp4"])
def test_two_threads_train_and_infer_with_one_model(name, device):
    """Each with an input of its own, of another shape, both shapes compiled before.

    Not while the other compiles: torch then takes a call for one made while tracing (pytorch/pytorch#126024).
    """
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    backend = fp4compile.backend(name, strict=True)
    inputs = [torch.randn(tokens, 64, device=device, requires_grad=True) for tokens in (32, 64)]

    def results(compiled, x):
        y = compiled(x)
        with torch.no_grad():
            inferred = compiled(x)
        return y.detach(), inferred, *torch.autograd.grad(y.square().sum(), x)

    compiled, found = torch.compile(model, backend=backend, dynamic=False), [[], []]
    expected = [results(compiled, x) for x in inputs]

    def work(index):
        for _ in range(10):
            found[index].append(results(compiled, inputs[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(found[index]) == 10
        assert all(all(map(torch.equal, result, expected[index])) for result in found[index])
