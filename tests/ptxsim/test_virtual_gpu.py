"""`ptxsim.gpu` and `python -m ptxsim`: arguments of launches, the messages of faults, orders of atomic operations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import ptxsim
from ptxsim.__main__ import main
from ptxsim.kernel_launch import UNWRITTEN
from tests.ptxsim.ptx_text import module

ROOT = Path(__file__).parents[2]


@triton.jit
def _scaled(x, y, bias, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = factor * tl.load(x + at, at < n)
    if bias is not None:
        value += tl.load(bias + at, at < n)
    tl.store(y + at, value, at < n)


@pytest.fixture
def gpu():
    with ptxsim.gpu("sm_100a") as gpu:
        yield gpu


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("n", [1, 16, 77])  # Triton makes a constant of 1, and knows what 16 divides
def test_numbers_and_none(gpu, n):
    x, bias, y = torch.randn(96), torch.randn(96), torch.zeros(96)
    _scaled[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, bias=bias, n=n, factor=-2.5, BLOCK=32, num_warps=1)
    assert torch.equal(y[:n], torch.addcmul(bias, x, torch.tensor(-2.5))[:n]) and not y[n:].any()
    _scaled[3, 1](x, y, None, 96, 0.5, BLOCK=32, num_warps=2, num_stages=1)
    assert torch.equal(y, 0.5 * x) and gpu.tally.instructions


def test_views_and_unaligned_tensors(gpu):
    x, y = torch.randn(8, 40)[:, 1:34:2].reshape(-1), torch.zeros(200)
    _scaled[(5,)](x, y[3:], None, len(x), 2.0, BLOCK=32)
    assert torch.equal(y[3 : 3 + len(x)], 2 * x) and not y[:3].any() and not y[3 + len(x) :].any()


@triton.jit
def _in_tuples(tensors, numbers, KIND: tl.constexpr):
    tl.store(tensors[1], (tl.load(tensors[0]) * numbers[0] + numbers[1]).to(KIND))


def test_tuples_and_types(gpu):
    x, y = torch.tensor([3.0]), torch.zeros(1, dtype=torch.int32)
    _in_tuples[(1,)]((x, y), (2.5, 4), KIND=tl.int32)
    assert y.item() == 11


def test_a_grid_without_programs(gpu):
    _scaled[(0,)](torch.zeros(1), torch.zeros(1), None, 1, 1.0, BLOCK=32)
    assert not gpu.tally.instructions


def test_wrong_arguments_are_named(gpu):
    x = torch.zeros(32)
    with pytest.raises(TypeError, match="argument y: a tensor on meta"):
        _scaled[(1,)](x, torch.zeros(32, device="meta"), None, 32, 1.0, BLOCK=32)
    with pytest.raises(TypeError, match="argument factor: str is no type"):
        _scaled[(1,)](x, x, None, 32, "1", BLOCK=32)
    with pytest.raises(TypeError, match=r"argument tensors: a tensor on meta"):
        _in_tuples[(1,)]((x, torch.zeros(1, device="meta")), (1, 1), KIND=tl.int32)


def test_unknown_architectures_and_the_interpreter(monkeypatch):
    with pytest.raises(ValueError, match=r"arch is 'sm_80', and not one of sm_90a, sm_100a"), ptxsim.gpu("sm_80"):
        pass
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set"), ptxsim.gpu("sm_100a"):
        pass


def test_triton_is_as_before_afterwards():
    config, run = triton.runtime.driver, triton.JITFunction.run
    before = config._active, dict(triton.backends.backends)
    with ptxsim.gpu("sm_103a"):
        assert config.active.get_current_target().arch == 103
        assert config.active.utils.get_device_properties(0)["multiprocessor_count"] == 148
    assert (config._active, dict(triton.backends.backends), triton.JITFunction.run) == (*before, run)


_tuned = triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])(_scaled)


def test_the_first_configuration_is_taken(gpu):
    x, y = torch.randn(64), torch.zeros(64)
    grids = []
    _tuned[lambda meta: grids.append(meta["BLOCK"]) or (2,)](x, y, None, 64, 1.0)
    assert torch.equal(y, x) and grids == [32]
    assert gpu.tally.notes["launches of the first of 2 configurations of _scaled"] == 1
    assert not _tuned.cache and len(_tuned.configs) == 2


# ---------------------------------------------------------------- faults


def test_a_fault_names_the_line_of_the_source(gpu):
    with pytest.raises(ptxsim.Fault, match=r"_scaled, line \d+: .*ld\.global.*, of test_virtual_gpu\.py:\d+: an acc"):
        _scaled[(1,)](torch.zeros(8), torch.zeros(32), None, 32, 1.0, BLOCK=32)


def test_a_new_tensor_is_unwritten(gpu):
    x = torch.empty(32)
    with pytest.raises(ptxsim.Fault, match="reads global memory that nothing wrote"):
        _scaled[(1,)](x, torch.zeros(32), None, 32, 1.0, BLOCK=32)
    assert (x.view(torch.uint8) == UNWRITTEN).all()


@triton.jit
def _checked(x, LIMIT: tl.constexpr):
    tl.device_assert(tl.load(x) < LIMIT, "too large")


def test_a_device_assert_ends_the_launch_with_its_text(gpu):
    _checked[(1,)](torch.tensor([3]), LIMIT=4, debug=True)
    with pytest.raises(ptxsim.Fault, match=r"device assert: too large \(.*test_virtual_gpu\.py:\d+, in "):
        _checked[(1,)](torch.tensor([4]), LIMIT=4, debug=True)


@triton.jit
def _told(x):
    tl.device_print("x", tl.load(x))


def test_all_unknown_forms_are_named_at_every_launch(gpu):
    for _ in range(2):  # Triton keeps the launcher of a kernel whose code could not be loaded
        with pytest.raises(ptxsim.UnknownForm, match=r"call.*a call of|vprintf"):
            _told[(1,)](torch.zeros(1))


@triton.jit
def _handed_over(x, flag, out, ORDER: tl.constexpr):
    """Program 0 stores and sets the flag; program 1 waits for it and loads."""
    if tl.program_id(0) == 0:
        tl.store(x, 7)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem=ORDER)
    else:
        while tl.atomic_add(flag, 0, sem=ORDER) == 0:
            pass
        tl.debug_barrier()
        tl.store(out, tl.load(x))


def test_a_release_and_an_acquisition_order_programs(gpu):
    out = torch.zeros(1, dtype=torch.int32)
    _handed_over[(2,)](torch.zeros_like(out), torch.zeros_like(out), out, ORDER="acq_rel", num_warps=1)
    assert out.item() == 7
    with pytest.raises(ptxsim.Fault, match="reads global memory that another program of the launch wrote"):
        _handed_over[(2,)](torch.zeros_like(out), torch.zeros_like(out), out, ORDER="relaxed", num_warps=1)


@gluon.jit
def _sums_of_bins(x, out, N: gl.constexpr, WAITS: gl.constexpr, layout: gl.constexpr):
    at = gl.arange(0, N, layout=layout)
    bins = gl.histogram(gl.load(x + at), 32, layout=layout)
    gl.store(out + gl.arange(0, 32, layout=layout), bins)


def test_atomic_operations_of_warps_in_shared_memory():
    """Four warps add to the same bins. An addition before the zeros are stored, or a load before all, is a race."""
    x, out = torch.randint(0, 32, (256,), dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with ptxsim.gpu("sm_100a", ptxsim.Schedule(2)):
        _sums_of_bins[(1,)](x, out, N=256, WAITS=True, layout=gl.BlockedLayout([1], [32], [4], [0]))
    assert torch.equal(out, torch.bincount(x, minlength=32).int())


# ---------------------------------------------------------------- offsets of more than 32 bits


@triton.jit
def _copied_rows(x, y, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row = row.to(tl.int64) if WIDE else row
    at = row * stride + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at) + 1)


def test_rows_that_lie_far_apart(gpu):
    """The third row begins 2^31 elements behind the first one."""
    x, y, stride = torch.randn(4, 64), torch.zeros(4, 64), 1 << 30
    given = [ptxsim.Apart(each, 4 * stride) for each in (x, y)]
    _copied_rows[(4,)](*given, stride, WIDE=True, BLOCK=64)
    assert torch.equal(y, x + 1)
    _copied_rows[(2,)](*given, stride, WIDE=False, BLOCK=64)  # the first two rows are within reach
    with pytest.raises(ptxsim.Fault, match="outside of all tensors"):
        _copied_rows[(4,)](*given, stride, WIDE=False, BLOCK=64)
    with pytest.raises(ptxsim.Fault, match="outside of all tensors"):
        _copied_rows[(4,)](*given, stride, WIDE=True, BLOCK=128)  # beyond a row


@pytest.mark.parametrize("tensor, stride, named", [
    (torch.zeros(8), 64, "tensor"), (torch.zeros(8, 8).T, 64, "tensor"), (torch.zeros(8, 8), 40, "stride"),
    (torch.zeros(8, 8), 16, "stride"),
])  # fmt: skip
def test_what_can_lie_apart(tensor, stride, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        ptxsim.Apart(tensor, stride)


# ---------------------------------------------------------------- the command


def test_a_script(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport tests.ptxsim.test_virtual_gpu as t\nimport torch\n\n\n"
                      "def broken():\n    x, y = torch.zeros(8), torch.zeros(32)\n"
                      "    t._scaled[(1,)](x, y, None, 32, 1.0, BLOCK=32)\n\n\n"
                      "if __name__ == '__main__':\n    y = torch.empty(32)\n"
                      "    t._scaled[(1,)](torch.ones(32), y, None, 32, float(sys.argv[1]), BLOCK=32)\n"
                      "    print(y.sum().item())\n")  # fmt: skip
    assert main(["--seed", "3", "--failing-waits", str(script), "--", "2.5"]) == 0
    assert capsys.readouterr().out.startswith("80.0\n")
    assert main([f"{script}::broken"]) == 1
    assert "fault: _scaled, line" in capsys.readouterr().err


def test_ptx_with_its_launch(tmp_path, capsys):
    body = "ld.param.u64 %rd1, [p0];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd1, %rd1, %rd2;\n"
    ptx, meta, result = tmp_path / "hand.ptx", tmp_path / "hand.json", tmp_path / "found.pt"
    ptx.write_text(module(body + "st.global.b32 [%rd1], %r1;", 32, 1))
    meta.write_text(json.dumps({"grid": [1], "arguments": [{"shape": [32], "dtype": "int32", "save": str(result)}]}))
    assert main([str(ptx), "--meta", str(meta)]) == 0
    assert torch.equal(torch.load(result), torch.arange(32, dtype=torch.int32))
    ptx.write_text(module(body + "foo.b32 %r1, %r2;\nbar.b16 %r1;\nfoo.b32 %r3, %r4;", 32, 1))
    assert main(["--list-forms", str(ptx)]) == 2
    assert [line.split(": ")[-1] for line in capsys.readouterr().err.splitlines()] == [
        "the form foo.b32 is unknown", "the form bar.b16 is unknown"]  # fmt: skip


def test_the_example():
    command = [sys.executable, "examples/simulate_kernel.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fault" in found.stdout and "right" in found.stdout
