"""The named recipes, as plain fields of `Recipe`. A new named recipe is one entry of `FIELDS`."""

from typing import Any

# The matmuls of a layer, and the recipe fields that hold the formats of the two operands.
OPERANDS = {
    "fprop": ("fprop_x", "fprop_w"),
    "dgrad": ("dgrad_dy", "dgrad_w"),
    "wgrad": ("wgrad_dy", "wgrad_x"),
    "attention": ("attention_a", "attention_b"),
}
PRODUCTS = tuple(OPERANDS)
ROLES = tuple(role for pair in OPERANDS.values() for role in pair)
_WEIGHTS = ("fprop_w", "dgrad_w")
# The operand of a gradient's matmul that may be the forward pass's: what the field says, and the field of the format.
FORWARD = "forward"
OF_FORWARD = {"dgrad_w": "fprop_w", "wgrad_x": "fprop_x"}


def _linear_layers(format: str, weights: str | None = None) -> dict[str, str]:
    """One format for every operand of fprop, dgrad and wgrad. weights: another format for the weights."""
    roles = [role for product in ("fprop", "dgrad", "wgrad") for role in OPERANDS[product]]
    return dict.fromkeys(roles, format) | dict.fromkeys(_WEIGHTS, weights or format)


# Three recipes quantise fprop alone. nvfp4_one_level: one-level scales cannot lift small gradients into range.
# nvfp4_static: the static scales are measured on activations only. nvfp4_weight_only: activations stay unquantised.
FIELDS: dict[str, dict[str, Any]] = {
    "nvfp4": _linear_layers("nvfp4"),
    "nvfp4_one_level": {"fprop_x": "nvfp4_one_level", "fprop_w": "nvfp4_one_level"},
    "nvfp4_static": {"fprop_x": "nvfp4", "fprop_w": "nvfp4", "activation_scale": "static"},
    "nvfp4_rowwise": _linear_layers("nvfp4_te") | {"fprop_x": "nvfp4_rowwise"},
    "nvfp4_weight_only": {"fprop_w": "nvfp4"},
    "nvfp4_train": _linear_layers("nvfp4_te", weights="nvfp4_16x16")
    | {"hadamard": ("wgrad",), "stochastic_rounding": ("dgrad", "wgrad")},
    "mxfp8": _linear_layers("mxfp8"),
    "mxfp8_floor": _linear_layers("mxfp8_floor"),
    "mxfp8_32x32": _linear_layers("mxfp8", weights="mxfp8_32x32"),
    "mxfp4": _linear_layers("mxfp4"),
    "float8_rowwise": _linear_layers("float8_rowwise"),
    "float8_tensor": _linear_layers("float8_tensor"),
    "float8_block": _linear_layers("float8_1x128", weights="float8_128x128"),
}
