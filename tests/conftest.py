import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path, monkeypatch):
    """Every test compiles from nothing: no graphs of another test, no caches of another run."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("FP4COMPILE_RECIPE", raising=False)
    monkeypatch.delenv("FP4COMPILE_DUMP", raising=False)
    torch._dynamo.reset()
    torch.manual_seed(0)
