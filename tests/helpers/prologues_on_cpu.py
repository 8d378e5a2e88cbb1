"""The passes of prologues on a CPU: they run as if tensors lay on an SM100 GPU, and the ops are their references."""

from fp4compile.hardware import Target
from fp4compile.ops import nodes
from fp4compile.passes import fuse_prologue, manager
from fp4compile.templates.quantize import prologue_cost


def fuse(monkeypatch, fused, look):
    """Let the passes fuse, or leave everything apart; look: called with each graph after them."""
    monkeypatch.setattr(fuse_prologue, "on_gpu", lambda value: fused)
    for module in (fuse_prologue, nodes):
        monkeypatch.setattr(module, "target_of", lambda device: Target(100))
    monkeypatch.setattr(prologue_cost, "SINCE", dict.fromkeys(prologue_cost.SINCE, 0))
    seen = manager.fused
    monkeypatch.setattr(manager, "fused", lambda one: look(one) or seen(one))
