"""Kernels and launch configurations that a test wants, through the registry that `choose` reads."""

from dataclasses import replace

from fp4compile.templates import choose


def configured(monkeypatch, name, configure):
    """Let a kernel be launched by `configure(problem)`, or by a given configuration."""
    given = configure if callable(configure) else lambda problem: configure
    _replace(monkeypatch, [replace(each, configure=given) if each.name == name else each for each in choose.REGISTRY])


def only(monkeypatch, name):
    """Let one kernel serve every product."""
    _replace(monkeypatch, [replace(choose.named(name), serves=lambda problem: True)])


def without(monkeypatch, name):
    """Let a kernel serve no product."""
    choose.named(name)
    _replace(monkeypatch, [each for each in choose.REGISTRY if each.name != name])


def _replace(monkeypatch, candidates):
    monkeypatch.setattr(choose, "REGISTRY", tuple(candidates))
