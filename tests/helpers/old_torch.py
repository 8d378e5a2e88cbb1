"""Marks of tests of what torch 2.11, the oldest that is supported, does not do."""

import pytest
import torch

TORCH_2_11 = torch.__version__.startswith("2.11.")


def not_under_torch_2_11(reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test under torch 2.11. reason: what that version does instead."""
    return pytest.mark.skipif(TORCH_2_11, reason=f"torch 2.11 {reason}")
