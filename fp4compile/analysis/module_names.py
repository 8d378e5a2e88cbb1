"""Conversions between the names of modules, parameters and packed submodules; blocks by their numbers."""

import re

_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def packed_name(parameter: str) -> str:
    """Name of the submodule that holds a packed parameter of experts."""
    return f"{parameter}_packed"


def parameter_name(packed: str) -> str:
    """The inverse of `packed_name`."""
    return packed.removesuffix("_packed")


def module_name(parameter: str) -> str:
    """The layer that a parameter belongs to: its name without `.weight`."""
    return parameter.removesuffix(".weight") if parameter != "weight" else ""


def block_of(module: str) -> tuple[str, int] | None:
    """("model.layers", 3) of "model.layers.3.mlp.up_proj"; None outside a numbered list."""
    match = _BLOCK.search(module)
    return None if match is None else (module[: match.start()], int(match.group(1)))


def clean_name(path: str) -> str:
    """A module path without the root variable and without the names that wrappers insert."""
    _, bracket, rest = path.rpartition("']")
    path = rest.lstrip(".") if bracket else path
    wrappers = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in path.split(".") if part not in wrappers)
