"""The inverse of packing: modules with weights in high precision, which can be trained."""

from torch import nn

from fp4compile.analysis.module_names import parameter_name
from fp4compile.weights.buffers import PackedWeight
from fp4compile.weights.experts import PackedExperts, remove
from fp4compile.weights.linear import unpacked_layer


def unpacked(module: nn.Module, requires_grad: bool) -> nn.Module:
    """A module in which parameters with the dequantised values replace all packed weights.

    module: changed in place, unless it is a packed layer itself, for which another is returned. requires_grad: of the
    parameters.
    """
    if isinstance(module, PackedWeight):
        return unpacked_layer(module, requires_grad)
    made: dict[int, nn.Module] = {}  # a layer with several names stays one
    for holder in list(module.modules()):
        for child, packed in list(holder._modules.items()):
            if isinstance(packed, PackedExperts):
                remove(holder, parameter_name(child), requires_grad)
            elif isinstance(packed, PackedWeight):
                holder._modules[child] = made.setdefault(id(packed), unpacked_layer(packed, requires_grad))
    return module
