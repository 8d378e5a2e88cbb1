"""Fixtures of the tests that compile whole models."""

import pytest

from fp4compile.weights import cache as weight_cache


@pytest.fixture
def packings(monkeypatch):
    """How often a weight was quantised outside a graph."""
    counted = []
    quantize = weight_cache._quantize

    def counting(weight, packed_as):
        counted.append((packed_as.format, packed_as.dim))
        return quantize(weight, packed_as)

    monkeypatch.setattr(weight_cache, "_quantize", counting)
    return counted
