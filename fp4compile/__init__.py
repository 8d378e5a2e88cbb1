"""fp4compile: block-scaled FP4 and FP8 matrix products for torch.compile."""

from fp4compile import config
from fp4compile.analysis.block_recipe import block_recipe
from fp4compile.backend import backend
from fp4compile.calibration.calibrate import calibrate
from fp4compile.calibration.scale_sweep import scale_sweep
from fp4compile.calibration.sensitivity import Sensitivity, sensitivity
from fp4compile.formats.formats import BlockFormat
from fp4compile.ops.functional import BlockScaled, quantize, scaled_grouped_mm, scaled_mm
from fp4compile.recipe import Recipe, add_arguments, recipes
from fp4compile.registration import register_with_accelerate, register_with_transformers
from fp4compile.report.report import Report
from fp4compile.roofline.explain import explain
from fp4compile.weights.buffers import make_shardable_
from fp4compile.weights.export import export_packed
from fp4compile.weights.files import load_packed, save_packed
from fp4compile.weights.pack import pack_
from fp4compile.weights.writes import refresh

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "BlockFormat",
    "BlockScaled",
    "Recipe",
    "Report",
    "Sensitivity",
    "__version__",
    "add_arguments",
    "backend",
    "block_recipe",
    "calibrate",
    "config",
    "explain",
    "export_packed",
    "load_packed",
    "make_shardable_",
    "pack_",
    "quantize",
    "recipes",
    "refresh",
    "register_with_accelerate",
    "register_with_transformers",
    "save_packed",
    "scale_sweep",
    "scaled_grouped_mm",
    "scaled_mm",
    "sensitivity",
]
