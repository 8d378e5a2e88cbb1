"""All uses of FSDP2's private attributes: groups of parameters, the pass that a gather is for, and its buffers.

FSDP2 does not pass to the hooks of a sharded parameter whether a gather is for a forward or a backward pass, and
allocates buffers itself at the first gather. Both are attributes of its `FSDPParam` and `FSDPParamGroup`.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule


class Sharded:
    """A parameter that FSDP2 shards. group: FSDP2's group of parameters that are gathered together.

    Both are weak references. The parameter's shard refers to this object, and torch has a view of the shard, which
    keeps the shard alive beyond the reach of Python's garbage collector: the whole model would never be freed.
    """

    def __init__(self, param: Any, group: Any):
        self._param, self._group = weakref.ref(param), weakref.ref(group)

    @property
    def param(self) -> Any:
        return self._param()

    @property
    def group(self) -> Any:
        return self._group()

    def __deepcopy__(self, memo: dict) -> "Sharded":
        return self  # Dynamo copies the objects to which a shard refers

    @property
    def modules(self) -> list[tuple[nn.Module, str]]:
        """The modules that have the parameter, each with the parameter's name in it."""
        info = self.param._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]

    @property
    def local(self) -> torch.Tensor:
        """The rank's shard."""
        return self.param._sharded_local_tensor

    @property
    def size(self) -> torch.Size:
        """The size of the whole parameter."""
        return self.param._orig_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole parameter, which the mixed-precision policy may set."""
        return self.param.mp_policy.param_dtype or self.local.dtype

    @property
    def device(self) -> torch.device:
        """The device of the whole parameter."""
        return self.param.device

    @property
    def ranks(self) -> int:
        return self.param.shard_mesh.size()

    @property
    def process_group(self) -> ProcessGroup:
        """The process group of the ranks that have the shards."""
        return self.param.shard_mesh.get_group()

    @property
    def offloaded(self) -> bool:
        """Whether the rank's shard lies in the host's memory, and FSDP2 copies it to the device at each gather."""
        return self.param.offload_to_cpu

    @property
    def gathered_before(self) -> bool:
        """Whether the whole parameter has been gathered."""
        return hasattr(self.param, "_unsharded_param")

    def obstacle(self) -> str | None:
        """The reason that the shards are not whole rows on a mesh of one dimension; None if they are."""
        param, group = self.param, self.group
        if param.is_dtensor:
            return "it is sharded by tensor parallelism too"
        if param._spmd_mesh.ndim != 1:
            return "its shards are replicated (HSDP)"
        if param.fsdp_placement.dim != 0:
            return f"it is sharded along dimension {param.fsdp_placement.dim}"
        if group._use_post_forward_mesh:
            return "it is resharded to a part of the ranks after the forward pass (reshard_after_forward)"
        return None

    def replace_local(self, local: torch.Tensor) -> None:
        """Replace the rank's shard by a tensor with hooks for FSDP2's gathers."""
        self.param.sharded_param._local_tensor = local
        self.param._sharded_param_data = local.view(-1)
        if not hasattr(self.param, "_extensions_data"):
            self.param._init_extensions()

    def gather_into(self, arriving: list[torch.Tensor], beside: list[torch.Tensor]) -> None:
        """Make FSDP2 gather into `arriving`, one for each sent tensor, and allocate and free `beside` with them."""
        self.param.all_gather_outputs = arriving
        self.param._unsharded_inner_tensors = beside

    # ------------------------------------------------------------ the pass that a gather is for

    @property
    def in_backward(self) -> bool:
        """Whether a gather now is for a backward pass, after a gather for its forward pass."""
        return self.group._training_state.name == "PRE_BACKWARD"

    @property
    def for_forward(self) -> bool:
        """Whether a gather now may be for a forward pass."""
        return not self.in_backward or not self.group.reshard_after_backward

    @property
    def for_backward(self) -> bool:
        """Whether a gather now may be for a backward pass."""
        state = self.group._training_state.name
        return state != "FORWARD" or not self.group._reshard_after_forward


def sharded_parameters(model: nn.Module) -> Iterator[Sharded]:
    """The parameters of a model that FSDP2 shards."""
    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                for param in group.fsdp_params:
                    if id(param) not in seen:
                        seen.add(id(param))
                        yield Sharded(param, group)


def _groups(state: Any) -> list[Any]:
    """FSDP2's groups of a module's parameters: several from torch 2.13 on, before that one or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [one for one in [state._fsdp_param_group] if one is not None]
