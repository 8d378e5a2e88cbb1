"""fp4compile: block-scaled FP4 and FP8 matrix products for torch.compile."""

from fp4compile.formats import BlockFormat
from fp4compile.ops import BlockScaled, quantize, scaled_mm

__all__ = ["BlockFormat", "BlockScaled", "quantize", "scaled_mm"]
