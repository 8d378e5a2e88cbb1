"""What holds for every test: how Inductor compiles, which tests need a GPU, and the order in which files start."""

import gc
import itertools
import os
import sys

import pytest
import torch

from tests.helpers import idle_kernels, in_interpreter, quiet_compiler

# Tests that run their whole file again in a process of its own, and those that compile a kernel for every GPU.
SLOW_TESTS = ("test_in_the_interpreter", "test_in_a_process_of_its_own", "test_compiles_ahead")
# What is true of the code of one version of Triton. Its interpreter is here too: that of 3.6 rounds FP8 in another way,
# and that of 3.8 takes the smallest E8M0 scale for zero.
PINNED_TRITON_TESTS = ("test_in_the_interpreter", "test_machine_code")  # how their names begin
LONGEST_TESTS = ("test_in_a_process_of_its_own", "test_random_launches")  # of two minutes and more

# Without a GPU Inductor writes C++. The two processes of `make test` keep two cores busy by themselves, so a pool of
# compiling processes in each of them (and in each script that a test starts) only costs their start. Scalar code
# compiles in half the time of vector code; the package's operations are called from it, and never compiled into it.
# Tensors are small: threads that share the work on one wait for each other most of the time. Garbage is collected when
# there is some, not after every compilation.
FOR_CPU = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0", "OMP_NUM_THREADS": "1",
           "TORCH_DYNAMO_RUN_GC_AFTER_COMPILE": "0"}  # fmt: skip

# Read by torch._inductor.config when it is imported: before the tests are.
if not torch.cuda.is_available():
    for variable, value in FOR_CPU.items():
        os.environ.setdefault(variable, value)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the variable already


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") == "1":
        in_interpreter.be_quick()


def pytest_collection_modifyitems(items):
    """Mark slow tests and those of one Triton, skip GPU tests where there is no GPU, put files with slow ones first.

    With `--dist worksteal` the process that has the slow tests gives the other one what it has not begun. So none is
    left with long tests while the other has nothing to do. A single test of minutes cannot be divided: it starts first.
    """
    quiet_compiler.leave_out_diagnostics()  # here because the process that hands out the tests collects none
    for item in items:
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
        if getattr(item, "originalname", None) in SLOW_TESTS or item.path.stem.endswith("machine_code"):
            item.add_marker(pytest.mark.slow)
        of_code = "ptxsim" in item.path.parts[-2:] or item.path.stem.endswith("machine_code")
        if of_code or item.name.startswith(PINNED_TRITON_TESTS):
            item.add_marker(pytest.mark.pinned_triton)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (getattr(item, "originalname", None) not in LONGEST_TESTS, item.path not in slow,
                                 item.path in slow and "templates" not in item.path.parts))  # fmt: skip


def pytest_collection_finish():
    """Let the garbage collector leave out what has been imported, and look for the cycles of compilations less often.

    Otherwise it takes a tenth of a compilation: it walks over half a million objects that live to the end.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_unconfigure():
    gc.unfreeze()  # Triton reports what is not collected at the end


_caches = itertools.count()


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path_factory, monkeypatch):
    """Every test compiles from nothing: no graphs of another test, no caches of another run, no report of an equal
    backend that another test has left alive.
    """
    folder = tmp_path_factory.getbasetemp() / f"inductor{next(_caches)}"  # made by those tests alone that compile
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.delenv("FP4COMPILE_RECIPE", raising=False)
    monkeypatch.delenv("FP4COMPILE_DUMP", raising=False)
    monkeypatch.delenv("FP4COMPILE_DISABLE_PASSES", raising=False)
    if "fp4compile.dynamo_backend" in sys.modules:  # the module; the name is a function's too
        sys.modules["fp4compile.dynamo_backend"]._shared.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def graphs_as_captured(fresh_compiler, monkeypatch):
    """For tests of decisions and reports: graphs run op by op, and Inductor generates nothing."""
    from tests.helpers import without_codegen  # imports this package

    without_codegen.install(monkeypatch)


@pytest.fixture
def without_kernels(fresh_compiler):
    """For tests of Inductor's graphs: no C++ is compiled."""
    with idle_kernels.compute_nothing():
        yield
