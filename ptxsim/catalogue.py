"""All supported instruction forms: importing this module registers them."""

from ptxsim import (  # noqa: F401
    access,
    atomics,
    calls,
    control,
    convert,
    copies,
    floating,
    integer,
    moves,
    tensor,
    tensor_map_forms,
    warp,
    warp_matrix,
    warp_products,
    warpgroup,
)
from ptxsim.forms import decode, known_forms

__all__ = ["decode", "known_forms"]
