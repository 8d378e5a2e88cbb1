"""fp4compile: block-scaled FP4 and FP8 matmuls for torch.compile.

Names of `_LATER` are imported at their first use, because the compiler takes seconds to import. The ops are declared at
import, so that exported programs find them.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import fp4compile_autoload
from fp4compile import config
from fp4compile.formats.formats import BlockFormat
from fp4compile.ops.functional import BlockScaled, quantize, scaled_grouped_mm, scaled_mm
from fp4compile.recipe import Recipe, add_arguments, recipes

if TYPE_CHECKING:
    from fp4compile.analysis.block_recipe import block_recipe
    from fp4compile.calibration.block_maxima import scale_sweep
    from fp4compile.calibration.calibrate import calibrate
    from fp4compile.calibration.pack import pack_
    from fp4compile.calibration.sensitivity import Sensitivity, sensitivity
    from fp4compile.registration import backend, register_with_accelerate, register_with_transformers
    from fp4compile.report.report import Report
    from fp4compile.roofline.explain import explain
    from fp4compile.weights.buffers import make_shardable_
    from fp4compile.weights.export import export_packed
    from fp4compile.weights.files import load_packed, save_packed
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

_LATER = {
    "Report": "report.report",
    "Sensitivity": "calibration.sensitivity",
    "backend": "registration",
    "block_recipe": "analysis.block_recipe",
    "calibrate": "calibration.calibrate",
    "explain": "roofline.explain",
    "export_packed": "weights.export",
    "load_packed": "weights.files",
    "make_shardable_": "weights.buffers",
    "pack_": "calibration.pack",
    "refresh": "weights.writes",
    "register_with_accelerate": "registration",
    "register_with_transformers": "registration",
    "save_packed": "weights.files",
    "scale_sweep": "calibration.block_maxima",
    "sensitivity": "calibration.sensitivity",
}

fp4compile_autoload.watch()  # `import torch` has done so, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 forbade it


if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """A name of `_LATER`, or a subpackage such as `fp4compile.roofline`."""
        if name in _LATER:
            found = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            found = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
