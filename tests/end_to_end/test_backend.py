"""The backend as frameworks use it: names, modes, options, dynamic shapes, graph breaks, checkpointing, DDP, caches."""

import json
import textwrap
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fp4compile
from fp4compile.recipe import recipes
from tests.helpers import idle_kernels, without_codegen
from tests.helpers.graphs import Recorder, compile_recorded
from tests.helpers.old_torch import not_under_torch_2_11
from tests.helpers.programs import Program

pytestmark = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class MLP(torch.nn.Module):
    def __init__(self, width=64, hidden=128):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def train_step(model, compiled, x):
    """(output, gradients by name) of one step."""
    model.zero_grad()
    y = compiled(x)
    y.square().mean().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_step(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    for name, grad in one[1].items():
        torch.testing.assert_close(grad, other[1][name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", [*recipes(), None])
def test_backend_by_name(name, monkeypatch):
    monkeypatch.setenv("FP4COMPILE_RECIPE", "mxfp8_floor")
    without_codegen.install(monkeypatch)
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    backend = fp4compile.backend(name or "mxfp8_floor")
    with torch.no_grad():
        by_name = torch.compile(layer, backend=f"fp4compile_{name}" if name else "fp4compile")(x)
        assert torch.equal(by_name, torch.compile(layer, backend=backend)(x)) and not torch.equal(by_name, layer(x))


def test_equal_backends_share_graphs():
    assert fp4compile.backend("mxfp8") == fp4compile.backend("mxfp8")
    assert hash(fp4compile.backend("mxfp8")) == hash(fp4compile.backend("mxfp8"))
    assert fp4compile.backend("mxfp8") != fp4compile.backend("mxfp4")
    assert fp4compile.backend("mxfp8") != fp4compile.backend("mxfp8", strict=True)


def test_overrides_reach_the_recipe():
    assert fp4compile.backend("mxfp8", skip_first_blocks=2).recipe.skip_first_blocks == 2
    with pytest.raises(ValueError, match="skip_first_blocks"):
        fp4compile.backend("mxfp8", skip_first_block=2)
    with pytest.raises(TypeError, match="strict"):
        fp4compile.backend("mxfp8", strict="yes")


@pytest.mark.parametrize(("mode", "device"), [
    ("max-autotune-no-cudagraphs", "cpu"),
    *(pytest.param(mode, "cuda", marks=pytest.mark.gpu) for mode in ("reduce-overhead", "max-autotune-no-cudagraphs")),
])  # fmt: skip
def test_modes(mode, device):
    """On a CPU "reduce-overhead" is no other mode than the default: there are no CUDA graphs."""
    model, x = MLP().to(device), torch.randn(4, 64, device=device)
    plain = train_step(model, torch.compile(model, backend=fp4compile.backend("nvfp4")), x)
    compiled = torch.compile(model, backend=fp4compile.backend("nvfp4"), mode=mode)
    for _ in range(3):  # CUDA graphs record on the second call and replay on the third
        assert_same_step(train_step(model, compiled, x), plain)


def test_a_mode_that_does_not_exist():
    with pytest.raises(Exception, match="Unrecognized mode"):
        torch.compile(MLP(), backend=fp4compile.backend("nvfp4"), mode="fastest")(torch.randn(4, 64))


@pytest.mark.parametrize("mode, options, name, value", [
    ("default", None, "triton.cudagraphs", False), ("reduce-overhead", None, "triton.cudagraphs", True),
    ("max-autotune", None, "triton.cudagraphs", True), ("max-autotune", None, "max_autotune", True),
    ("max-autotune-no-cudagraphs", None, "triton.cudagraphs", False),
    ("max-autotune-no-cudagraphs", None, "max_autotune", True),
    (None, {"max_autotune": True}, "triton.cudagraphs", False), (None, {"max_autotune": True}, "max_autotune", True),
])  # fmt: skip
def test_modes_and_options_arrive_in_inductors_configuration(mode, options, name, value, monkeypatch):
    seen = without_codegen.install(monkeypatch)
    torch.compile(MLP(), backend=fp4compile.backend("mxfp8"), mode=mode, options=options)(torch.randn(4, 64))
    assert [configuration[name] for configuration in seen] == [value]


@pytest.mark.usefixtures("without_kernels")
def test_options_reach_inductor_and_user_passes_run():
    model, x = MLP(), torch.randn(4, 64)
    recorder = Recorder()
    backend = fp4compile.backend("mxfp8")
    compiled, behind = compile_recorded(model, backend, joint_custom_pre_pass=recorder)
    compiled(x).sum().backward()
    (joint,) = recorder.graphs
    assert "aten.addmm" in joint and "fp4compile" not in joint  # the user's pass sees the graph that it expects
    assert all("fp4compile.scaled_mm" in graph for graph in behind.graphs)
    assert len(backend.report.quantised) == 5


def test_user_pass_in_the_config_is_composed_with():
    recorder = Recorder()
    with torch._inductor.config.patch(joint_custom_pre_pass=recorder):
        torch.compile(MLP(), backend=fp4compile.backend("mxfp8", strict=True))(torch.randn(4, 64))
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_one_graph_for_three_batch_sizes(grad, monkeypatch):
    model = MLP()
    recorder = Recorder()
    compiled = torch.compile(
        model, backend=fp4compile.backend("mxfp8"), dynamic=True, fullgraph=True,
        options={"post_grad_custom_pre_pass": recorder},
    )  # fmt: skip
    inputs = [torch.randn(batch, 5, 64) for batch in (8, 11, 33)]  # Inductor tells one block of tokens from several
    with torch.set_grad_enabled(grad):
        got = [train_step(model, compiled, x) if grad else compiled(x) for x in inputs]
    without_codegen.install(monkeypatch)
    for x, one in zip(inputs, got, strict=True):
        fixed = torch.compile(MLP(), backend=fp4compile.backend("mxfp8"), dynamic=False)
        fixed._orig_mod.load_state_dict(model.state_dict())
        if grad:
            assert_same_step(one, train_step(fixed._orig_mod, fixed, x))
        else:
            with torch.no_grad():
                torch.testing.assert_close(one, fixed(x), rtol=1e-5, atol=1e-6)
    assert len(recorder.graphs) == (2 if grad else 1)


def test_unbacked_token_counts(monkeypatch):
    """An expert loop: each expert sees a number of tokens that only the data knows."""
    experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def route(x, expert):
        out = torch.zeros_like(x)
        for index, layer in enumerate(experts):
            rows = torch.nonzero(expert == index).squeeze(-1)
            out = out.index_add(0, rows, layer(x[rows]))
        return out

    x, expert = torch.randn(20, 64), torch.randint(0, 3, (20,))
    backend = fp4compile.backend("mxfp8")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        out = torch.compile(route, backend=backend, fullgraph=True)(x, expert)
    assert len(backend.report.quantised) == 3
    without_codegen.install(monkeypatch)
    for row in range(20):
        alone = torch.compile(experts[expert[row]], backend=fp4compile.backend("mxfp8"))
        with torch.no_grad():
            torch.testing.assert_close(out[row : row + 1], alone(x[row : row + 1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_activation_checkpointing_saves_inputs_only_and_gives_the_same_bits(device):
    """The bits on a GPU; those on a CPU are `test_gradients_are_those_without_checkpointing`'s."""
    model, x = torch.nn.ModuleList([MLP(), MLP()]).to(device), torch.randn(32, 64, device=device, requires_grad=True)

    def forward(x, wrap):
        for block in model:
            x = wrap(block, x)
        return x

    def recomputed(x):
        return forward(x, lambda block, x: checkpoint(block, x, use_reentrant=False))

    def kept(x):
        return forward(x, lambda block, x: block(x))

    compiled, recorder = compile_recorded(recomputed, fp4compile.backend("nvfp4"))
    with idle_kernels.compute_nothing() if device == "cpu" else nullcontext():
        found = train_step(model, compiled, x)
    if device == "cuda":
        assert_same_step(found, train_step(model, torch.compile(kept, backend=fp4compile.backend("nvfp4")), x))
    forward_graph, backward_graph = recorder.graphs
    saved = forward_graph.splitlines()[-1]
    assert "uint8" not in saved and "float8" not in saved  # nothing packed is kept, it is made again
    # Beside 2 x 4 gradients, only `up` of each block runs again: GELU's gradient needs its output.
    assert backward_graph.count("fp4compile.scaled_mm") == 8 + 2


def test_sparse_gradients():
    embed, layer = torch.nn.Embedding(96, 64, sparse=True), torch.nn.Linear(64, 64)
    tokens = torch.arange(24).view(2, 12) // 2
    backend = fp4compile.backend("mxfp8", strict=True)
    torch.compile(torch.nn.Sequential(embed, layer), backend=backend)(tokens).sum().backward()
    weight = fp4compile.quantize(layer.weight.detach(), "mxfp8", dim=0).dequantize().mT
    expected = torch.zeros(96, 64).index_add(0, tokens.flatten(), torch.ones(24, 64) @ weight)
    assert embed.weight.grad.is_sparse
    assert torch.equal(embed.weight.grad.to_dense(), expected)  # float32 holds the sums of such codes exactly


def test_strict_raises_with_the_reasons():
    layer = torch.nn.Linear(64, 64)
    with pytest.raises(RuntimeError, match=r"rule '\*'"):
        torch.compile(layer, backend=fp4compile.backend("mxfp8", strict=True, rules=[("*", "skip")]))(torch.ones(2, 64))
    with pytest.raises(RuntimeError, match="no matmul found"):
        torch.compile(torch.nn.ReLU(), backend=fp4compile.backend("mxfp8", strict=True))(torch.ones(2, 64))


class InParts(torch.nn.Module):
    """Three graphs: of an embedding, of the layer `first`, and of the layer `second`."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = torch.nn.Embedding(8, 64), *(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_graphs_that_others_follow_decide_nothing(monkeypatch):
    """A graph without a matmul and one that rules skip raise nothing; the last one does, if it quantises nothing."""
    without_codegen.install(monkeypatch)
    backend = fp4compile.backend("mxfp8", strict=True, rules=[("first", "skip")])
    torch.compile(InParts(), backend=backend)(torch.arange(4))
    assert [row.module for row in backend.report.quantised if row.product == "fprop"] == ["second"]
    neither = fp4compile.backend("mxfp8", strict=True, rules=[("first", "skip")], min_m=32)
    with pytest.raises(RuntimeError, match="quantised nothing: 3 x M=4 is below min_m=32"):
        torch.compile(InParts(), backend=neither)(torch.arange(4))


class RouterFirst(torch.nn.Module):
    """Three graphs: of a convolution, of a router, and of a layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.router, self.layer = (
            torch.nn.Conv1d(64, 64, 1),
            torch.nn.Linear(64, 64),
            torch.nn.Linear(64, 64),
        )

    def forward(self, x):
        x = self.conv(x[..., None])[..., 0]
        torch._dynamo.graph_break()
        gate = self.router(x)
        torch._dynamo.graph_break()
        return self.layer(x) * gate


def test_graphs_of_layers_that_are_left_out_for_their_kind_decide_nothing(monkeypatch):
    without_codegen.install(monkeypatch)
    backend = fp4compile.backend("mxfp8", strict=True)
    torch.compile(RouterFirst(), backend=backend)(torch.ones(4, 64))
    assert {row.module for row in backend.report.quantised} == {"layer"}


def test_a_loss_that_is_compiled_after_its_model_decides_nothing(monkeypatch):
    without_codegen.install(monkeypatch)
    backend, model = fp4compile.backend("mxfp8", strict=True), torch.nn.Linear(64, 64)
    out = torch.compile(model, backend=backend)(torch.ones(4, 64))
    loss = torch.compile(lambda out: out.square().mean(), backend=fp4compile.backend("mxfp8", strict=True))
    loss(out).backward()
    with pytest.raises(RuntimeError, match="no operand is a parameter"):  # a graph with a matmul decides
        torch.compile(lambda x: x @ x, backend=backend)(torch.ones(64, 64))


@not_under_torch_2_11("stores no compiled module")
def test_graphs_that_are_stored_in_a_file(tmp_path):
    model, x = MLP(), torch.randn(4, 64)
    backend = fp4compile.backend("mxfp8", rules=[("down", "skip")])
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled.forward.aot_compile(((x,), {})).save_compiled_function(tmp_path / "graph")
        assert [(row.module, row.reason) for row in backend.report.rows] == [("up", None), ("down", "rule 'down'")]
        with (tmp_path / "graph").open("rb") as file:
            stored = torch.compiler.load_compiled_function(file)
        model.up.weight.mul_(2)  # nothing is kept of the weights that the graph was made with
        assert torch.equal(stored(model, x), compiled(x))


@not_under_torch_2_11("stores no compiled module")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_static"])
def test_graphs_of_packed_models_that_are_stored_in_a_file(recipe, tmp_path):
    model, x = MLP().bfloat16(), torch.randn(4, 64).bfloat16()
    recipe = fp4compile.calibrate(model, [x], recipe) if recipe == "nvfp4_static" else recipe
    fp4compile.pack_(model, recipe)
    compiled = torch.compile(model, backend=fp4compile.backend(recipe), fullgraph=True)
    with torch.no_grad():
        compiled.forward.aot_compile(((x,), {})).save_compiled_function(tmp_path / "graph")
        with (tmp_path / "graph").open("rb") as file:
            stored = torch.compiler.load_compiled_function(file)
        assert torch.equal(stored(model, x), model(x))
        model.bfloat16().down.weight.data.mul_(2)
        assert torch.equal(stored(model, x), model(x))


def test_nothing_matched_warns_once():
    backend = fp4compile.backend("mxfp8")
    compiled = torch.compile(torch.nn.ReLU(), backend=backend, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(2, 64))
        compiled(torch.ones(3, 64))
    assert sum("quantised nothing" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32], ids=["float64", "complex64", "int32"])
def test_other_dtypes_are_left_alone_with_a_reason(dtype):
    reason = str(dtype).replace("torch.", "dtype ")
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype), requires_grad=False)
    backend = fp4compile.backend("mxfp8")
    x = torch.ones(4, 64, dtype=dtype)
    with pytest.warns(UserWarning, match=reason):
        out = torch.compile(lambda x: x @ weight, backend=backend)(x)
    assert torch.equal(out, x @ weight)
    assert [row.reason for row in backend.report.rows] == [reason]


def run_python(code, folder):
    """The last line that the code prints, from JSON, run in a fresh process, which has other hashes of strings."""
    done = Program(["-c", textwrap.dedent(code)], folder).ended()
    assert done.status == 0, done.said
    return json.loads(done.printed.splitlines()[-1])


CACHED = """
    import json, sys, torch, fp4compile
    from torch._dynamo.utils import counters

    def run(recipe):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        backend = fp4compile.backend(recipe, strict=True)
        y = torch.compile(model, backend=backend)(torch.ones(4, 64))
        y.sum().backward()
        return {"hits": counters["aot_autograd"]["autograd_cache_hit"], "y": y.sum().item(),
                "misses": counters["aot_autograd"]["autograd_cache_miss"], "report": backend.report.to_dict()}
"""
PRINTED = """
    print(json.dumps([run(recipe) for recipe in {}]))
"""


def test_second_process_hits_the_caches_and_a_changed_recipe_misses_them(tmp_path, monkeypatch):
    """So a recipe's digest, which is in the key, is the same in another process.

    Neither process is the one that runs the tests: after AOTInductor, for example, a process has another key.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (first,) = run_python(CACHED + PRINTED.format(["mxfp8"]), tmp_path)
    again, other = run_python(CACHED + PRINTED.format(["mxfp8", "mxfp4"]), tmp_path)
    assert (first["hits"], first["misses"]) == (0, 1)
    assert (again["hits"], again["misses"]) == (1, 0)
    assert (other["hits"], other["misses"]) == (0, 1)
    assert again["y"] == first["y"] != other["y"]
    assert first["report"].pop("seconds") and not again["report"].pop("seconds"), "no pass runs on a cached graph"
    assert again["report"] == first["report"] and first["report"]["quantised"] == 5
