import os

import pytest
import torch

from tests.helpers import in_interpreter, kept_shapes


def pytest_configure():
    if os.environ.get("TRITON_INTERPRET") == "1":
        in_interpreter.patch_triton_once()
        kept_shapes.keep_shapes()


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` run where there is one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path, monkeypatch):
    """Every test compiles from nothing: no graphs of another test, no caches of another run."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("FP4COMPILE_RECIPE", raising=False)
    monkeypatch.delenv("FP4COMPILE_DUMP", raising=False)
    monkeypatch.delenv("FP4COMPILE_DISABLE_PASSES", raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
