"""Experts by the library on SM100: what it is given, that torch and MSLK take it, and when `max-autotune` takes it."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4compile import _compat
from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.grouping import Groups, padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_OPAQUE
from fp4compile.ops.nodes import scaled_mm_of
from fp4compile.passes.lib import autotune
from fp4compile.passes.lower import lower
from fp4compile.templates import choose as registry
from fp4compile.templates.choose import choose, named, to_time
from fp4compile.templates.gemm import library
from fp4compile.templates.gemm.block_scaled_sm100 import sm100_configs
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import call_of
from fp4compile.templates.problem import problem_of
from tests.helpers.absent_gpu import symbolic
from tests.helpers.arguments import of_groups, times
from tests.helpers.clock import Clock
from tests.helpers.grouped_library_checks import calls_of, calls_whatever_is_served, check, check_ends
from tests.helpers.library_checks import Refused

BF16 = torch.bfloat16
LIBRARY, KERNEL = "library_block_scaled", "grouped_block_scaled_sm100"
FORMATS = [("nvfp4", "nvfp4"), ("nvfp4_te", "nvfp4_16x16"), ("nvfp4_one_level", "nvfp4"), ("mxfp8", "mxfp8"),
           ("mxfp8_floor", "mxfp8_32x32")]  # fmt: skip
SIZES = [(16, 32), (768, 2048), (2048, 7168), (1040, 96), (144, 1056)]  # of N and K


@pytest.fixture(autouse=True)
def a_build_with_the_library(monkeypatch):
    monkeypatch.setattr(_compat, "built_with_mslk", lambda: True)


def empty_operand(name, rows, k, scale_rows, batch=(), outer=None):
    """An operand as SM100 quantises it, without values. outer: of which shape its outer scale is; None: a group's."""
    fmt = formats.get(name)
    blocks = ceil_div(k, fmt.block_cols)
    width = blocks * fmt.block_cols // (2 if fmt.packed else 1)
    data = torch.empty(*batch, rows, width, dtype=fmt.data_dtype)
    scales = torch.empty(*batch, swizzled_numel(scale_rows, blocks), dtype=fmt.scale_dtype)
    return Operand(data, scales, torch.empty(outer) if outer is not None else None, fmt)


def operands(rows, groups, n, k, a="nvfp4", b=None, outers=(None, None)):
    """(A, B, offsets). outers: shapes of the outer scales; None stands for one a group, where the format has one."""
    names = a, b or a
    shapes = ((groups,) if outer is None and formats.get(name).outer else outer
              for name, outer in zip(names, outers, strict=True))  # fmt: skip
    a_outer, b_outer = shapes
    left = empty_operand(names[0], rows, k, padded_rows(rows, groups), (), a_outer)
    return left, empty_operand(names[1], n, k, n, (groups,), b_outer), torch.empty(groups, dtype=torch.int32)


def offsets(rows, seed):
    """Of groups with any number of rows; of no rows, one row and all rows, with rows of no group and without."""
    random = Random(seed)
    many = sorted(random.randint(0, rows) for _ in range(7))
    return [[0] * 4, [rows], [0, 1, 1, rows], [rows // 2, rows // 2, rows], [*many, rows], many][seed % 6]


@pytest.mark.parametrize(("a", "b"), FORMATS, ids=str)
def test_what_the_router_sends_is_taken(a, b):
    """For numbers of tokens up to 300: by torch, and by the device, which reads the offsets' values."""
    with torch.device("meta"):
        for rows in (*range(1, 31), *range(31, 301, 7)):
            ends, (n, k) = offsets(rows, rows), SIZES[rows % len(SIZES)]
            (arguments,) = calls_of(*operands(rows, len(ends), n, k, a, b), rows)
            check(arguments)
            check_ends(arguments, ends)
            if a.startswith("mxfp8"):  # torch's other op for these has a meta implementation, with checks of its own
                same = (arguments[name] for name in ("self", "mat2"))
                scales = (arguments[name][0] for name in ("scale_a", "scale_b"))
                torch.ops.aten._scaled_grouped_mm(*same, *scales, arguments["offs"], out_dtype=BF16)


@pytest.mark.parametrize("outers", [((), ()), ((3,), ()), ((), (3,))], ids=str)
def test_outer_scales_are_one_a_group(outers):
    with torch.device("meta"):
        (arguments,) = calls_of(*operands(40, 3, 256, 512, outers=outers), 40)
        check(arguments)


def test_the_kernel_serves_all_that_the_library_serves():
    """So that the library is never chosen by rank, however large the product."""
    with torch.device("meta"):
        for (a, b), (n, k), rows, groups in zip(FORMATS, SIZES, (1, 64, 5000, 2**17, 300), (1, 3, 256, 64, 2),
                                                strict=True):  # fmt: skip
            problem = problem_of(of_groups(*operands(rows, groups, n, k, a, b), rows, BF16), Target(100))
            assert choose(problem).kernel == KERNEL
            found = to_time(problem)
            assert [one.kernel for one in found] == [*[KERNEL] * len(sm100_configs(problem)), LIBRARY]
            assert named(found[-1].kernel) is library.BLOCK_SCALED


NOT_SENT = {
    "N of no whole 16 columns": {"n": 520}, "rows of no whole 16 bytes": {"k": 1040},
    "no tokens": {"rows": 0}, "more groups than threads": {"groups": 257}, "E5M2": {"a": "mxfp8_e5m2"},
    "mixed widths": {"a": "mxfp8", "b": "mxfp4"}, "MXFP4": {"a": "mxfp4"},
    "row outer scales": {"a": "nvfp4_rowwise", "b": "nvfp4", "outers": ((256, 1), None)},
    "float16 results": {"out_dtype": torch.float16}, "10.3": {"sm": 103}, "12.0": {"sm": 120}, "9.0": {"sm": 90},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SENT)
def test_what_is_not_sent(name):
    given = {"rows": 256, "groups": 4, "n": 512, "k": 1024, **NOT_SENT[name]}
    options = {key: given.pop(key) for key in ("out_dtype", "sm") if key in given}
    with torch.device("meta"):
        assert calls_of(*operands(**given), given["rows"], **options) == []


def test_a_build_without_the_library(monkeypatch):
    monkeypatch.setattr(_compat, "built_with_mslk", lambda: False)
    with torch.device("meta"):
        assert calls_of(*operands(256, 4, 512, 1024), 256) == []


@pytest.mark.parametrize(("flags", "there"), [
    ("CXX_FLAGS= -DUSE_FBGEMM -DUSE_MSLK -O2, USE_CUDA=ON", True), ("CXX_FLAGS= -DUSE_FBGEMM -O2, USE_CUDA=0", False),
    ("CXX_FLAGS= -DUSE_FBGEMM -O2, USE_MSLK=OFF", False),
])  # fmt: skip
def test_which_builds_have_the_library(flags, there, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.__config__, "show", lambda: flags)
    assert _compat.built_with_mslk.__wrapped__() == there


def test_groups_along_the_contraction_are_not_sent():
    """Where a group's scales are, they are not as MSLK looks for them: with more than 128 rows, of either operand."""
    fmt, groups, rows = formats.get("mxfp8"), 4, 300
    padded = padded_rows(rows, groups)
    with torch.device("meta"):
        a, b = (empty_operand(fmt.name, size, padded, size) for size in (256, 512))
        offs = torch.empty(groups, dtype=torch.int32)
        assert calls_of(a, b, offs, rows) == []
        assert {one.kernel for one in to_time(problem_of(of_groups(a, b, offs, rows, BF16), Target(100)))} == {KERNEL}


BREAKS = {
    "N": ({"n": 520}, "% 16"), "K": ({"k": 1040}, "% 16"), "MXFP4": ({"a": "mxfp4"}, "recipe|scales"),
    "E5M2": ({"a": "mxfp8_e5m2"}, "scales of|dtype"), "groups": ({"groups": 257}, "more threads"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_router_that_sends_everything_is_found_out(name):
    """The checks refuse what the router keeps back: they can fail."""
    changes, message = BREAKS[name]
    given = {"rows": 256, "groups": 4, "n": 512, "k": 1024, **changes}
    with torch.device("meta"), pytest.raises((Refused, RuntimeError), match=message):
        (arguments,) = calls_whatever_is_served(call_of(of_groups(*operands(**given), 256, BF16), Target(100)))
        check(arguments)


def test_the_op_on_a_cpu_is_the_reference():
    fmt, offs = formats.get("nvfp4"), torch.tensor([0, 3, 5], dtype=torch.int32)
    a = reference_grouped.quantize_rows(torch.randn(6, 64), Groups.of(offs, 6), fmt, None, "swizzled", None)
    b = reference_grouped.quantize_matrices(torch.randn(3, 16, 64), fmt, -1, None, "swizzled", None, False)
    arguments, options = of_groups(Operand(*a, fmt), Operand(*b, fmt), offs, 6, BF16).call
    (got,) = SCALED_MM_OPAQUE(*arguments, "library", **options)
    assert torch.equal(got, SCALED_MM(*arguments, **options))
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(SCALED_MM_OPAQUE, (*arguments, "library"), options, test_utils=checks)


# ---------------------------------------------------------------- max-autotune


def experts(name, along_k=False):
    """A product of quantised tokens and weights, or of two quantised tensors of tokens."""

    def function(x, w, offs):
        found = []
        for each, dim, groups in ((x, -2 if along_k else -1, offs), (w, -2 if along_k else -1, offs)):
            groups = None if each.dim() == 3 else groups
            data, scales, outer = torch.ops.fp4compile.quantize(each, name, dim, offs=groups, layout="swizzled")
            found.append((data, scales, outer if outer.numel() else None, name))
        return times(*found, offs=offs, rows=x.shape[0])

    return function


def lowered(function, shapes, groups=4, sm=100, dynamic=False, then=lower):
    """(the last two launches, fp4compile's ops that are left) of a function lowered for a GPU that is not there."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, enable_python_dispatcher(), dry_run(Target(sm)) as launches:
        shapes = [list(shape) for shape in shapes]
        if dynamic:
            shapes[0][0] = symbolic(mode.shape_env, shapes[0][0])
        tensors = [torch.empty(shape, device="cuda", dtype=BF16) for shape in shapes]
        graph = make_fx(function)(*tensors, torch.empty(groups, device="cuda", dtype=torch.int32)).graph
        then(graph)
    left = [str(node.target) for node in graph.nodes if "fp4compile" in str(node.target)]
    return [one.kernel.__name__ for one in launches][-2:], left


FORWARD = (256, 512), (4, 1024, 512)
BY_LIBRARY = ["group_ends", "clear_ungrouped_rows"], ["fp4compile.scaled_mm_opaque.default"]
NATIVE = "gemm_block_scaled_sm100"


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_one_level"])
def test_time_decides(name, monkeypatch):
    """Both are timed, the kernel in its configurations, once for equal products; without the mode it is the kernel."""
    clock = Clock(monkeypatch, {LIBRARY: 1.0, KERNEL: 2.0})
    with config.patch(max_autotune=True):
        for _ in range(2):
            assert lowered(experts(name), FORWARD) == BY_LIBRARY
    assert clock.kernels == [[KERNEL, KERNEL, LIBRARY]]
    launches, left = lowered(experts(name), FORWARD)
    assert (launches[-1], left) == (NATIVE, []) and len(clock.timed) == 1


@pytest.mark.parametrize("times", [{LIBRARY: 2.0, KERNEL: 1.0}, {LIBRARY: float("inf"), KERNEL: 1.0},
                                   {LIBRARY: float("inf"), KERNEL: float("inf")}], ids=str)  # fmt: skip
def test_the_kernel_where_it_is_faster_or_nothing_was_timed(times, monkeypatch):
    Clock(monkeypatch, times)
    with config.patch(max_autotune=True):
        launches, left = lowered(experts("nvfp4"), FORWARD)
    assert (launches[-1], left) == (NATIVE, [])


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("along_k", [False, True], ids=["rows", "along K"])
def test_the_fastest_configuration_is_launched(along_k, index, monkeypatch):
    """Of groups along the contraction, too, which are the kernel's alone."""
    function, shapes = experts("nvfp4", along_k), ((256, 512), (256, 384)) if along_k else FORWARD
    configs, ran, original = [], [], named(KERNEL).run

    def keep(graph):
        (node,) = graph.find_nodes(op="call_function", target=SCALED_MM)
        configs.extend(sm100_configs(scaled_mm_of(node).problem))

    def run(call, config):
        ran.append(config)
        return original(call, config)

    lowered(function, shapes, then=keep)
    clock = Clock(monkeypatch, {configs[index]: 1.0})
    kernels = tuple(replace(one, run=run) if one.name == KERNEL else one for one in registry.REGISTRY)
    monkeypatch.setattr(registry, "REGISTRY", kernels)
    with config.patch(max_autotune=True):
        lowered(function, shapes)
    assert clock.kernels == [[KERNEL, KERNEL] + [LIBRARY] * (not along_k)] and ran == [configs[index]]


@pytest.mark.parametrize("options", [{"dynamic": True}, {"shapes": ((0, 512), (4, 1024, 512))}],
                         ids=["a symbolic number of tokens", "no tokens"])  # fmt: skip
def test_what_is_not_timed(options, monkeypatch):
    clock = Clock(monkeypatch, {LIBRARY: 1.0})
    with config.patch(max_autotune=True):
        _, left = lowered(experts("nvfp4"), **{"shapes": FORWARD, **options})
    assert not clock.timed and not left


def test_what_is_timed_is_the_product(monkeypatch):
    """On real tensors like the product's own, without NaN; of groups that are as large as each other."""
    with torch.device("meta"):
        a, b, offs = operands(10, 4, 32, 64)
    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=0))
    monkeypatch.setattr(torch, "empty_strided", lambda *args, device, **more: empty_strided(*args, **more))
    with unset_fake_temporarily():
        copies = autotune._copies(of_groups(a, b, torch.empty_like(offs, device="cpu"), 10, BF16))
    assert len(copies) == autotune.FEWEST_CALLS and len({one.a.data.data_ptr() for one in copies}) == len(copies)
    for made in copies:
        assert (made.offs.tolist(), made.offs.dtype) == ([2, 5, 7, 10], torch.int32)
        assert (made.rows, made.spec.out_dtype) == (10, BF16)
        for like, x in ((a, made.a), (b, made.b)):
            assert not isinstance(x.data, FakeTensor) and x.outer.isfinite().all() and x.outer.shape == (4,)
            assert (x.data.shape, x.data.dtype, x.scales.shape) == (like.data.shape, like.data.dtype, like.scales.shape)
            assert x.scales.view(torch.uint8).unique().tolist() == [0x38]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (10, 0), reason="needs SM100")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("offs", [(0, 3, 133, 133, 134, 163), (0, 0, 0, 0, 0, 0), (170,) * 6], ids=str)
def test_values_on_sm100(name, offs, monkeypatch):
    """Empty groups, one row, all rows in one; rows of no group are zeros."""
    monkeypatch.undo()
    if not _compat.built_with_mslk():
        pytest.skip("torch has no MSLK")
    fmt, offs = formats.get(name), torch.tensor(offs, dtype=torch.int32)
    a = reference_grouped.quantize_rows(torch.randn(170, 288), Groups.of(offs, 170), fmt, None, "swizzled", None)
    b = reference_grouped.quantize_matrices(torch.randn(6, 144, 288), fmt, -1, None, "swizzled", None, False)
    expected = reference_grouped.scaled_grouped_mm(Operand(*a, fmt), Operand(*b, fmt), offs, 170, BF16)
    left, right = (Operand(*(None if t is None else t.cuda() for t in x), fmt) for x in (a, b))
    call = call_of(of_groups(left, right, offs.cuda(), 170, BF16), Target(100))
    got = library.BLOCK_SCALED.run(call, None).cpu()
    largest = expected.float().abs().amax()
    assert ((got.float() - expected.float()).abs() <= 2.0**-7 * largest).all()
    assert not got[offs[-1] :].any()
