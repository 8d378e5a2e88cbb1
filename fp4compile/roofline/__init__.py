"""Predicted times of a model's compiled graph on a GPU: `explain`, and the GPUs with published rates."""

from fp4compile.hardware import GPUS, Gpu

__all__ = ["GPUS", "Gpu"]
