"""The values of `check-sm100 --run`: what the simulator checks, on this GPU, and more.

Every kernel that may be chosen for a product computes it, also of hard operands and in larger sizes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from fp4compile.check.cases import Case, Here
from fp4compile.check.product_table import PRODUCTS, Product
from fp4compile.check.product_values import Made, by_every_kernel, reduced
from fp4compile.check.quantiser_table import MORE_CONFIGURATIONS
from fp4compile.check.quantiser_values import Check, checks
from fp4compile.check.values import ENDS, GROUP_ROWS, finite, not_finite
from fp4compile.formats import formats

# Whole tiles; then partly filled tiles in rows, columns and blocks.
WHOLE, RAGGED = (256, 1024), (130, 1000)
PAIRS = (
    *((name, name) for name in ("nvfp4", "nvfp4_one_level", "nvfp4_te", "mxfp8", "mxfp4")),
    ("nvfp4_rowwise", "nvfp4_te"), ("nvfp4_te", "nvfp4_16x16"), ("mxfp8", "mxfp8_32x32"), ("mxfp8_e5m2", "mxfp8"),
    ("mxfp8", "mxfp4"), (None, "nvfp4"), (None, "mxfp8"),
)  # fmt: skip
# M, N, K: whole tiles; ragged tiles; rows of results, or of codes, that are no multiples of 16 bytes; few tokens.
SHAPES = (
    (512, 1024, 2048), (300, 520, 1040), (130, 257, 544), (200, 384, 528), (1, 512, 1024), (8, 512, 1024),
    (16, 528, 1040), (33, 520, 2048), (64, 1024, 4096),
)  # fmt: skip
EPILOGUE_SHAPES = ((300, 520, 1040), (16, 512, 1024))
OF_EXPERTS = tuple(name for name, fmt in formats.NAMED.items() if not fmt.square)  # formats


def cases() -> list[Case]:
    """Every case, in an order that finds simple faults first."""
    found = [
        Case(f"{name}{', ragged' * i}", partial(checked, check))
        for name, each in checks(WHOLE, RAGGED, more=MORE_CONFIGURATIONS) for i, check in enumerate(each)
    ]  # fmt: skip
    for a, b in PAIRS:
        hard = [Product(a, b, *shape) for shape in SHAPES] + [Product(a, b, 70, 136, 256, batches=3)]
        hard += [Product(a, b, *shape, epilogue=kind) for shape in EPILOGUE_SHAPES for kind in ("bias", "gated")]
        found += [_product("product", one, finite) for one in hard]
        found.append(_product("not finite, product", hard[0], not_finite))
    exact = [replace(reduced(one), kernel="") for one in PRODUCTS]  # by every kernel, so without one of its own
    for name in OF_EXPERTS:
        exact.append(Product(name, name, GROUP_ROWS, 520, 1040, groups=len(ENDS)))
        exact.append(Product(name, name, 520, 1040, GROUP_ROWS, groups=len(ENDS), along_k=True))
    return found + [_product("exact product", one) for one in dict.fromkeys(exact)]


def _product(what: str, product: Product, made: Made | None = None) -> Case:
    return Case(f"{what} {product.formats}, {product.label}", partial(by_every_kernel, product, Here(), made))


def checked(check: Check) -> dict[str, Any]:
    """What a check finds on this GPU."""
    return {"wrong": check(Here())}
