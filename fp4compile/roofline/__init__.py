"""Predicted times of linear layers and experts on a GPU."""

from fp4compile.hardware import GPUS, Gpu
from fp4compile.roofline.model import Experts, Prediction, predict
from fp4compile.roofline.time_terms import TimedStep

__all__ = ["GPUS", "Experts", "Gpu", "Prediction", "TimedStep", "predict"]
