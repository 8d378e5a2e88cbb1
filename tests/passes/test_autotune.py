"""`max-autotune`: what is timed, how, and what becomes of it. The clock and the GPU are pretended."""

import dataclasses
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.codecache as codecache
import torch.nn.functional as F
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import fp4compile
from fp4compile import _compat
from fp4compile.check.products import TWO_CTAS, MatmulCase
from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_OPAQUE
from fp4compile.ops.nodes import scaled_mm_of
from fp4compile.passes.lib import autotune
from fp4compile.passes.lower import lower
from fp4compile.templates import choose as registry
from fp4compile.templates.choose import named, to_time
from fp4compile.templates.gemm import library
from fp4compile.templates.gemm.heuristics import BlockScaledConfig
from fp4compile.templates.launch import dry_run
from fp4compile.templates.problem import problem_of
from tests.helpers.absent_gpu import ANY, fused_graph, launched_on
from tests.helpers.arguments import times
from tests.helpers.quantising_products import graph_of

LIBRARY, KERNEL, EXPERTS = "library_block_scaled", "block_scaled_sm100", "grouped_block_scaled_sm100"
TILES = BlockScaledConfig(128, 128, 256, 3, 4), BlockScaledConfig(128, 256, 256, 3, 4)


class Clock:
    """What was timed, as (kernel, configuration), and how long it is said to take: by configuration, else by kernel."""

    def __init__(self, monkeypatch, times):
        self.timed, self.times = [], times
        monkeypatch.setattr(autotune, "_winners", {})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(autotune, "_copies", lambda product: [None])
        monkeypatch.setattr(autotune, "_times", self._times)

    @property
    def kernels(self):
        return [[kernel for kernel, _ in each] for each in self.timed]

    def _times(self, sequences):
        choices = [call.keywords["choice"] for (call,) in sequences]
        self.timed.append([(choice.kernel, choice.config) for choice in choices])
        return [self.times.get(choice.config, self.times.get(choice.kernel, float("inf"))) for choice in choices]


def with_tiles(monkeypatch, *tiles):
    """Let the kernels of block-scaled products have these configurations, and TILES[0] without a clock."""
    given = {"configurations": lambda problem: tiles, "configure": lambda problem: TILES[0]}
    entries = tuple(
        dataclasses.replace(each, **given) if each.name in (KERNEL, EXPERTS) else each for each in registry.REGISTRY
    )
    monkeypatch.setattr(registry, "REGISTRY", entries)


def plain(x, w):
    return x @ w.t()


def gated(x, w, same):
    return torch.relu(x @ w.t()) * same


def in_groups(x, w, offs, dim):
    operands = []
    for each in (x, w):
        groups = {"each_matrix": True} if each.dim() == 3 else {"offs": offs}
        operands.append((*torch.ops.fp4compile.quantize(each, "nvfp4", dim, layout="swizzled", **groups), "nvfp4"))
    return times(*operands, offs=offs, rows=x.shape[0])


def experts(x, w, offs):
    return in_groups(x, w, offs, -1)


def of_tokens(x, w, offs):
    """Groups along the contraction."""
    return in_groups(x, w, offs, -2)


BF16, OF_EXPERTS = torch.bfloat16, [torch.bfloat16, torch.bfloat16, torch.int32]
FORWARD = (258, 512), (4, 1024, 512), (4,)


@pytest.mark.parametrize(("recipe", "library", "kernel", "expected"), [
    ("mxfp8", 1.0, 2.0, "_scaled_mm"), ("mxfp8", 2.0, 1.0, "gemm_block_scaled_sm100"),
    ("mxfp8", float("inf"), 1.0, "gemm_block_scaled_sm100"), ("nvfp4", 1.0, 2.0, "library"),
    ("nvfp4", 2.0, 1.0, "gemm_block_scaled_sm100"), ("nvfp4", float("inf"), float("inf"), "library"),
])  # fmt: skip
def test_time_decides(recipe, library, kernel, expected, monkeypatch):
    """Where both can compute the product, the default recipe's too; by rank where nothing could be timed."""
    with_tiles(monkeypatch, TILES[0])
    clock = Clock(monkeypatch, {LIBRARY: library, KERNEL: kernel})
    with config.patch(max_autotune=True):
        for _ in range(2):
            assert launched_on(100, recipe)[1][-1][0] == expected
        assert clock.timed == [[(LIBRARY, None), (KERNEL, TILES[0])]]  # once for equal ones
        for sm, other in ((100, "mxfp4"), (90, recipe), (120, recipe)):
            launched_on(sm, other)
    launched_on(100, "nvfp4_one_level")
    assert len(clock.timed) == 1


@pytest.mark.parametrize("best", TILES)
@pytest.mark.parametrize(("function", "shapes", "kernel", "others"), [
    (plain, ((256, 1024), (512, 1024)), KERNEL, [(LIBRARY, None)]), (experts, FORWARD, EXPERTS, []),
    (of_tokens, ((256, 512), (256, 384), (4,)), EXPERTS, []),
], ids=["dense", "experts", "along the contraction"])  # fmt: skip
def test_every_configuration_is_timed(function, shapes, kernel, others, best, monkeypatch):
    """The fastest one is launched; without the mode, what is first by rank, in the configuration of the heuristics."""
    with_tiles(monkeypatch, *TILES)
    clock = Clock(monkeypatch, {LIBRARY: 3.0, **dict.fromkeys(TILES, 2.0), best: 1.0})

    def launched(settings):
        with config.patch(settings):
            return fused_graph(function, *shapes, dtypes=OF_EXPERTS[: len(shapes)], then=lower).launches[-1].constants

    constants = launched({"max_autotune": True})
    assert (constants["BM"], constants["BN"]) == (best.bm, best.bn)
    assert clock.timed == [[*others, *((kernel, each) for each in TILES)]]
    assert launched({"max_autotune": True}) == constants and len(clock.timed) == 1
    by_rank = launched({})  # where it is the library, the quantise kernel is the last launch
    assert (by_rank.get("BN") == (None if others else TILES[0].bn)) and len(clock.timed) == 1


@pytest.mark.parametrize("tokens", [ANY, 0], ids=["a symbolic number", "none"])
def test_tokens_of_experts_that_are_not_timed(tokens, monkeypatch):
    clock = Clock(monkeypatch, {EXPERTS: 1.0})
    with config.patch(max_autotune=True):
        graph = fused_graph(experts, (tokens, 512), *FORWARD[1:], dtypes=OF_EXPERTS, then=lower).graph
    assert not clock.timed and not [node for node in graph.nodes if "fp4compile" in str(node.target)]


def test_products_with_epilogues_are_timed(monkeypatch):
    """Only by what applies the epilogue, with the tensors that it reads; another epilogue is another problem."""
    with_tiles(monkeypatch, *TILES)
    clock = Clock(monkeypatch, {TILES[0]: 2.0, TILES[1]: 1.0})
    with config.patch(max_autotune=True):
        for function in (gated, gated, lambda x, w, same: torch.relu(x @ w.t()) + same):
            result = fused_graph(function, (256, 512), (512, 512), (256, 512), then=lower)
            assert result.fused == 1 and result.launches[-1].constants["BN"] == 256
    assert clock.timed == [[(KERNEL, each) for each in TILES]] * 2


def test_one_epilogue_of_tensors_of_two_dtypes_is_timed_for_each(monkeypatch):
    """The kernel reads twice as many bytes of float32; the steps, and what they make, are the same."""
    with_tiles(monkeypatch, *TILES)
    clock, texts = Clock(monkeypatch, {TILES[0]: 2.0, TILES[1]: 1.0}), []
    wide = lambda x, w, same: (torch.relu(x @ w.t()).float() * same).bfloat16()  # noqa: E731
    with config.patch(max_autotune=True):
        for function, dtype in ((gated, BF16), (wide, torch.float32)) * 2:
            found = fused_graph(function, (256, 512), (512, 512), (256, 512), dtypes=[BF16, BF16, dtype], then=lower)
            assert found.fused == 1
            texts.append(found.launches[-1].constants["EPILOGUE"])
    assert len(set(texts)) == 1, "what the kernel is compiled for has no dtypes of pointers"
    assert clock.timed == [[(KERNEL, each) for each in TILES]] * 2


@pytest.mark.skipif(not _compat.two_cta_products(), reason="Gluon has no products of pairs of CTAs")
@pytest.mark.parametrize(("recipe", "last"), [("mxfp4", "quantize mxfp4"), ("nvfp4", "amax")])
def test_a_graph_of_gate_and_up_has_the_fastest_kernel(recipe, last, monkeypatch):
    """Pairs of CTAs, where they are: the op returns what the next product, or its quantiser, reads."""

    def phi_mlp(x, w, w_down):
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.linear(up * F.silu(gate), w_down)

    clock, found = Clock(monkeypatch, {TWO_CTAS: 1.0, LIBRARY: 2.0}), []
    with config.patch(max_autotune=True):
        graph_of(phi_mlp, (4096, 512), (4096, 512), (512, 2048), recipe=recipe, lowered=found.append)
    assert [KERNEL, TWO_CTAS] in clock.kernels
    nodes = found[0].find_nodes(op="call_function", target=SCALED_MM_OPAQUE)
    (node,) = (node for node in nodes if node.args[-1] == "2-CTA")
    assert node.args[-2].endswith(f" | {last}") and len(node.users) == 2


@pytest.mark.parametrize("result", ["nvfp4", "amax", ""])
def test_results_of_every_kind_are_timed(result, monkeypatch):
    """What is timed are launches of each choice, by the function that returns the problem's results."""
    x = MatmulCase("nvfp4", "nvfp4", 4096, epilogue="gated", result=result).arguments()
    choices = to_time(problem_of(x, Target(100)))
    assert {KERNEL, *[TWO_CTAS] * _compat.two_cta_products()} <= {choice.kernel for choice in choices}

    def times(sequences):
        with dry_run(Target(100)) as launches:
            for (call,) in sequences:
                call()
        assert len(launches) == len(choices)
        return [float(launch.num_ctas == 1) for launch in launches]

    monkeypatch.setattr(autotune, "_copies", lambda product: [product])
    monkeypatch.setattr(autotune, "_times", times)
    fastest = autotune._fastest(x, choices)
    assert fastest.kernel == (TWO_CTAS if _compat.two_cta_products() else KERNEL)


def test_a_candidate_without_epilogues_is_not_timed_with_one(monkeypatch):
    with_tiles(monkeypatch, *TILES)
    without = dataclasses.replace(named(KERNEL), name="another", takes_epilogue=lambda problem: False)
    monkeypatch.setattr(registry, "REGISTRY", (*registry.REGISTRY, without))
    clock = Clock(monkeypatch, {"another": 1.0, TILES[0]: 2.0, TILES[1]: 3.0})
    with config.patch(max_autotune=True):
        fused_graph(lambda x, w: torch.relu(x @ w.t()), (256, 512), (512, 512), then=lower)
    assert clock.timed == [[(KERNEL, each) for each in TILES]]


def test_by_rank_where_nothing_could_be_timed(monkeypatch):
    """Then in the configuration of the heuristics, whichever was to be timed first."""
    with_tiles(monkeypatch, *reversed(TILES))
    Clock(monkeypatch, {})
    with config.patch(max_autotune=True):
        launches = fused_graph(plain, (256, 512), (512, 512), recipe="mxfp4", then=lower).launches
    assert launches[-1].constants["BN"] == TILES[0].bn


SHAPES = {plain: ((256, 512), (512, 512)), gated: ((256, 512), (512, 512), (256, 512)), experts: FORWARD}


def product_node(function=plain):
    """The product of a graph, as it is before it is lowered."""
    found, shapes = [], SHAPES[function]

    def keep(graph):
        found.extend(scaled_mm_of(node) for node in graph.find_nodes(op="call_function", target=SCALED_MM))

    fused_graph(function, *shapes, dtypes=OF_EXPERTS if function is experts else (), then=keep)
    (product,) = found
    return product


@contextmanager
def pretended_device(monkeypatch, l2):
    """A GPU with an L2 cache of so many bytes, whose tensors are made on the CPU."""
    properties = SimpleNamespace(L2_cache_size=l2)
    empty_strided, tensor = torch.empty_strided, torch.tensor
    with monkeypatch.context() as patch, unset_fake_temporarily():
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch, "empty_strided", lambda *args, device, **more: empty_strided(*args, **more))
        patch.setattr(torch, "tensor", lambda *args, device, **more: tensor(*args, **more))
        yield


@pytest.mark.parametrize("function", SHAPES)
def test_what_is_timed_is_the_product(function, monkeypatch):
    """On tensors like the product's own, real ones, without NaN; as many as fill the L2 cache twice, within limits."""
    wanted = product_node(function).values()
    size = sum(x.nbytes for one in (wanted.a, wanted.b) for x in (one.data, one.scales))
    with dry_run(Target(100)), pretended_device(monkeypatch, 3 * size):
        copies = autotune._copies(wanted)
    assert len(copies) == 6
    for copy in copies:
        assert copy.bias is None and copy.spec.out_dtype == torch.bfloat16
        assert (copy.spec.epilogue is not None) == (function is gated) == len(copy.auxiliaries)
        assert (copy.offs is not None) == (function is experts)
        if copy.offs is not None:  # sizes of groups differ by at most one row
            assert (copy.offs.tolist(), copy.offs.dtype, copy.rows) == ([64, 129, 193, 258], torch.int32, 258)
        for like, x in ((wanted.a, copy.a), (wanted.b, copy.b)):
            assert not isinstance(x.data, FakeTensor) and x.outer.isfinite().all() and x.outer.shape == like.outer.shape
            assert (x.data.shape, x.data.dtype, x.scales.shape) == (like.data.shape, like.data.dtype, like.scales.shape)
            assert x.scales.view(torch.uint8).unique().tolist() == [0x38]
    assert len({copy.a.data.data_ptr() for copy in copies}) == len(copies)


@pytest.mark.parametrize(("l2", "count"), [(0, autotune.FEWEST_CALLS), (2**30, autotune.MOST_CALLS)])
def test_how_many_calls_a_graph_has(l2, count, monkeypatch):
    product = product_node()
    with dry_run(Target(100)), pretended_device(monkeypatch, l2):
        assert len(autotune._copies(product.values())) == count


class Streams:
    """CUDA's streams, graphs and events, of which replays take as long as `calls` say."""

    def __init__(self, monkeypatch):
        self.running, self.clock, self.captured = None, 0.0, []
        for name, value in {
            "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None), "current_stream": lambda: None,
            "stream": lambda stream: nullcontext(), "synchronize": lambda: None, "CUDAGraph": self.new_graph,
            "graph": self.capture, "Event": self.event,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def new_graph(self):
        graph = SimpleNamespace(time=0.0)
        graph.replay = lambda: setattr(self, "clock", self.clock + graph.time)
        return graph

    @contextmanager
    def capture(self, graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        start = self.clock
        self.captured.append(graph)
        yield
        graph.time, self.clock = self.clock - start, start

    def event(self, enable_timing):
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.clock)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def call(self, milliseconds):
        def run():
            self.clock += milliseconds

        return run


ERRORS = [
    OutOfResources(300_000, 232_448, "shared memory"), PTXASError("ptxas fatal"), CompilationError("", None, "no"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"), torch.OutOfMemoryError("out of memory"),
    RuntimeError("PassManager::run failed"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failing_candidate_is_out(error, monkeypatch):
    """Of errors of Triton and of the library; an error of this package is not swallowed."""
    streams = Streams(monkeypatch)

    def failing():
        raise error

    fast, slow = streams.call(0.25), streams.call(0.5)
    times = autotune._times([[fast] * 4, [failing] * 4, [slow] * 2])
    assert times == [250.0, float("inf"), 500.0]
    assert len(streams.captured) == 2

    def wrong():
        raise TypeError("choice")

    with pytest.raises(TypeError):
        autotune._times([[wrong]])


def test_the_median_counts(monkeypatch):
    """One slow replay of many changes nothing."""
    streams = Streams(monkeypatch)
    slow = iter([9.0, *[0.0] * 1000])
    monkeypatch.setattr(autotune, "_captured", lambda calls: SimpleNamespace(
        replay=lambda: setattr(streams, "clock", streams.clock + 1.0 + next(slow))))  # fmt: skip
    assert autotune._times([[None], [None]]) == [1000.0, 1000.0]


def test_no_memory_for_the_operands(monkeypatch):
    """Then the choice is that of rank."""
    Clock(monkeypatch, {})
    monkeypatch.setattr(autotune, "_copies", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with config.patch(max_autotune=True):
        assert launched_on(100, "nvfp4")[1][-1][0] == "library"


@pytest.mark.parametrize("sm", [90, 103])
def test_inductor_times_no_products_of_float8(sm):
    """Codes are views of bytes. Torch 2.11 times products of the bytes: every choice fails, and so does compiling."""
    with config.patch(max_autotune=True):
        timed = launched_on(sm, "float8_rowwise")
    untimed = launched_on(sm, "float8_rowwise")
    assert (timed[1][-1], untimed[1][-1]) == (("library", None), ("_scaled_mm", None))
    assert timed[0] == untimed[0] == "native" and timed[1][:-1] == untimed[1][:-1]


def test_the_cache_on_disk_tells_timed_choices_apart(monkeypatch):
    """Inductor's keys have the mode and the GPU's name, so that a timed choice stays where it was made."""

    def key():
        graph = torch.fx.symbolic_trace(torch.nn.Identity())
        return codecache.compiled_fx_graph_hash(graph, [], {}, [])[0]

    plain = key()
    with config.patch(max_autotune=True):
        assert key() != plain
    assert key() == plain
    for name in ("NVIDIA B200", "NVIDIA B300"):
        system = {"device": {"name": name}, "version": {"triton": "3"}, "hash": name}
        monkeypatch.setattr(codecache.CacheBase, "get_system", staticmethod(lambda system=system: system))
        assert key() != plain
        plain = key()
    assert key() == plain


@pytest.mark.gpu
def test_timed_on_a_gpu(monkeypatch):
    """Every way to compute `float8_rowwise` on the GPU that is here is timed, and the chosen one's product is right.

    They are the library with row scales, the library without, and Hopper's own kernel.
    """
    both = dataclasses.replace(library.RESCALED, serves=library.ROW_SCALED.serves)
    entries = tuple(both if each.name == both.name else each for each in registry.REGISTRY)
    monkeypatch.setattr(registry, "REGISTRY", entries)
    monkeypatch.setattr(autotune, "_winners", {})
    times, found = autotune._times, []
    monkeypatch.setattr(autotune, "_times", lambda calls: found.append(times(calls)) or found[-1])
    layer = torch.nn.Linear(512, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16)
    chosen = fp4compile.backend("float8_rowwise", strict=True)
    compiled = torch.compile(layer, backend=chosen, options={"max_autotune": True})
    with torch.no_grad(), config.patch(force_disable_caches=True):
        got = compiled(x)
    (timed,) = found
    assert len(timed) == (3 if torch.cuda.get_device_capability() == (9, 0) else 2)
    assert all(0 < time < 10_000 for time in timed)
    fmt = formats.get("float8_rowwise")
    a, b = (Operand(*reference.quantize(t.cpu(), fmt), fmt) for t in (x, layer.weight.detach()))
    expected = reference.scaled_mm(a, b, layer.bias.detach().cpu(), torch.bfloat16)
    torch.testing.assert_close(got.cpu(), expected, rtol=2.0**-6, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["float8_rowwise", "mxfp8", "nvfp4", "nvfp4_weight_only"])
@pytest.mark.parametrize("rows", [16, 512])
def test_the_mode_on_a_gpu(recipe, rows):
    """Inductor times what is left to it, the products of experts too. Another kernel may add in another order."""

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(256, 512)
            self.experts = torch.nn.Parameter(torch.randn(4, 256, 512) / 16)

        def forward(self, x, offs):
            hidden = torch.nn.functional.silu(self.first(x))
            return torch.nn.functional.grouped_mm(hidden, self.experts.transpose(1, 2), offs=offs)

    torch.manual_seed(0)
    model = Layers().cuda().bfloat16()
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([rows // 4, rows // 4, rows // 2, rows], dtype=torch.int32, device="cuda")
    found = []
    for mode in ("max-autotune", None):
        torch.compiler.reset()
        chosen = fp4compile.backend(recipe, strict=True)
        with torch.no_grad(), config.patch(force_disable_caches=True):
            found.append(torch.compile(model, backend=chosen, mode=mode)(x, offs).clone())
        assert len([row for row in chosen.report.rows if row.quantised]) == 2
    # Two orders of the reference's sums part by up to 0.0009 of the norm: a hidden value rounds to another code.
    got, expected = (result.float() for result in found)
    assert (got - expected).norm() <= 2.0**-8 * expected.norm()
