"""fp4compile: block-scaled FP4 and FP8 matrix products for torch.compile."""

from fp4compile import config
from fp4compile.backend import backend, register_with_accelerate
from fp4compile.calibrate import calibrate
from fp4compile.explain import explain
from fp4compile.formats import BlockFormat
from fp4compile.functional import BlockScaled, quantize, scaled_grouped_mm, scaled_mm
from fp4compile.packed.export import export_packed
from fp4compile.packed.files import load_packed, save_packed
from fp4compile.packed.integration import register_with_transformers
from fp4compile.packed.pack import pack_
from fp4compile.recipe import Recipe, add_arguments, recipes
from fp4compile.report import Report
from fp4compile.scale_sweep import scale_sweep
from fp4compile.sensitivity import Sensitivity, sensitivity
from fp4compile.weight_cache import refresh

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
    "calibrate",
    "config",
    "explain",
    "export_packed",
    "load_packed",
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
