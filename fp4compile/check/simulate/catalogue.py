"""Every instruction form that the simulator knows: importing this module registers the forms of all subjects."""

from fp4compile.check.simulate import (  # noqa: F401
    access,
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
    warpgroup,
)
from fp4compile.check.simulate.forms import decode, known_forms

__all__ = ["decode", "known_forms"]
