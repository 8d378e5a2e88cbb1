"""The modules by which `fp4compile.pack_` replaces linear layers, and which layers they can replace.

A packed layer is an instance of the class that it replaces, so that libraries of adapters can wrap it.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from fp4compile._compat import transformed
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.weights.buffers import (
    BUFFERS,
    STATE_HOOKS,
    DequantizedWeight,
    LayerFormat,
    PackedWeight,
    autocast_dtype,
)
from fp4compile.weights.packed_product import packed_linear, trains

_KEPT_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# The hooks that a packed layer cannot keep. A forward pre-hook may change the weight, as weight_norm's does.
_REFUSED_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward hook",
    **dict.fromkeys(STATE_HOOKS, "a state-dict hook"),
}


class PackedLayer(PackedWeight):
    """A linear layer whose weight W [out, in] is block-scaled and frozen: y = x @ W^T + bias.

    The input has a gradient, dX = dY @ W with the dequantised W, and so has the bias; the weight has none. The
    derivative of quantising the input is taken as 1.

    bias: a parameter [out_features], or None, cast as in every module. See `PackedWeight` for the buffers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layer_format: LayerFormat,
        bias: nn.Parameter | None,
        *,
        weight_dtype: torch.dtype = torch.float32,
    ):
        in_first = not isinstance(self, nn.Linear)
        PackedWeight.__init__(self, None, in_features, out_features, layer_format, weight_dtype, in_first)
        self.bias = bias

    @staticmethod
    def in_place_of(linear: nn.Module, layer_format: LayerFormat) -> "PackedLayer":
        """A packed layer with a linear layer's sizes, bias, hooks, attributes and mode, but without its weight yet."""
        kind: Any = PackedLinear if isinstance(linear, nn.Linear) else _packed_conv1d()
        packed = kind(*sizes(linear), layer_format, linear.bias, weight_dtype=linear.weight.dtype)
        # The packed layer takes over the dictionaries of hooks, because the handles that remove hooks refer to them.
        packed.__dict__.update({name: getattr(linear, name) for name in _KEPT_HOOKS})
        packed.__dict__.update(_attributes(linear))
        return packed.train(linear.training)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the replaced layer's shape, dequantised at each access; see `DequantizedWeight` for writes."""
        return self.read()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif not isinstance(value, DequantizedWeight) or not value.packed_in(self):
            raise AttributeError("weight: a packed layer's cannot be assigned; assign weight.data, or before packing")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Raises AttributeError for a weight, which `RowwiseParallel` registers."""
        if name == "weight":
            raise AttributeError("weight: no parameter of a packed layer; tensor parallelism takes unpacked layers")
        super().register_parameter(name, param)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [..., in_features], bf16, fp16 or fp32. Returns [..., out_features] in its dtype, or autocast's.

        Raises TypeError for another dtype or if `input` is no dense tensor, ValueError for another last dimension,
        NotImplementedError for a tangent of forward-mode differentiation.
        """
        # Dynamo traces this for each layer of a model, and guards what is read here in each call: so what is usual is
        # tested first, and read from the module's own attributes.
        dense = isinstance(input, torch.Tensor) and input.layout is torch.strided and not input.is_nested
        fits = dense and input.dtype in FLOAT_DTYPES and input.dim() > 0 and input.shape[-1] == self.in_features
        if not fits or self.weight_data.is_meta or forward_ad._current_level >= 0:
            self._check(input)
        dtype = autocast_dtype(input.device)
        input = input if dtype is None else input.to(dtype)
        static = None if self._static is None else self.activation_outer_on(input.device)
        data, outer = self.weight_data, self.weight_outer
        given = input, self.bias, data, self.weight_scales, outer, static, self._activation, self._format
        # An error of the op would reach the user as Dynamo's, and not as TypeError.
        cast = data.dtype.is_floating_point or (outer is not None and outer.dtype is not torch.float32)
        if cast or not torch.compiler.is_dynamo_compiling():
            return packed_linear(*given)
        # Dynamo traces tensors of `torch.func.grad` as ones without a gradient, and batches no `Function` of `vmap`.
        if torch.is_grad_enabled() and transformed(gradients_only=False):
            # Dynamo does not notice that `input` has a gradient since a write to a view of it; a new view has it.
            trained = trains(input.view(input.shape), self.bias)
            if trained or transformed(gradients_only=True):
                torch._dynamo.graph_break()  # eager mode does both
        return torch.ops.fp4compile.packed_linear(*given)

    def _check(self, input: torch.Tensor) -> None:
        """Raise the error of an input that `forward` cannot multiply, if it is one."""
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input: expected a torch.Tensor, got {type(input).__name__}")
        if input.is_nested:
            raise TypeError("input: expected a dense tensor, got a nested one")
        if input.layout is not torch.strided:
            raise TypeError(f"input: expected a dense tensor, got one of the layout {_name_of(input.layout)}")
        if input.dtype not in FLOAT_DTYPES:
            raise TypeError(f"input: dtype {input.dtype} cannot be multiplied; allowed are bfloat16, float16, float32")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(f"input: expected shape (..., {self.in_features}), got {tuple(input.shape)}")
        if self.weight_data.is_meta and not input.is_meta:
            raise ValueError("weight: has no values, as where a loader did not find them in its file; load a packed "
                             "model's state, or call fp4compile.load_packed with an unpacked model")  # fmt: skip
        for name, tensor in (("input", input), ("bias", self.bias)):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(f"{name}: a packed layer has no derivatives in forward mode (torch.func.jvp, "
                                          "jacfwd); take them in reverse mode")  # fmt: skip


class PackedLinear(PackedLayer, nn.Linear):
    """A packed `nn.Linear`; see `PackedLayer`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In older pickles a packed Conv1D also has this class. Its codes are those of [out, in], the shape of `weight`.
        super().__setstate__(state | {"in_first": False})


@functools.cache
def _packed_conv1d() -> type:
    """The class `PackedConv1D`, created at the first use, because transformers need not be installed."""
    from transformers.pytorch_utils import Conv1D

    members = {"__module__": __name__, "__doc__": "A packed Conv1D of transformers; see `PackedLayer`."}
    return type("PackedConv1D", (PackedLayer, Conv1D), members | {"__repr__": nn.Module.__repr__})


def __getattr__(name: str) -> type:
    """`PackedConv1D`, which pickle looks up as an attribute of this module."""
    if name == "PackedConv1D":
        return _packed_conv1d()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def unpacked_layer(packed: PackedLayer, requires_grad: bool) -> nn.Module:
    """The dequantised layer that a packed one replaced. Raises ValueError if a library replaced its `forward`."""
    if "forward" in vars(packed):
        raise ValueError(
            "a packed layer with another forward (a hook of accelerate?) cannot be unpacked: unpack before"
        )
    kind: Any = next(base for base in type(packed).__bases__ if not issubclass(base, PackedWeight))
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = packed.in_features, packed.out_features
    layer.weight = nn.Parameter(packed.dequantised(), requires_grad)
    layer.register_parameter("bias", packed.bias)  # assigned, None would be an attribute, which no packed layer keeps
    layer.__dict__.update({name: getattr(packed, name) for name in _KEPT_HOOKS})
    layer.__dict__.update({name: value for name, value in vars(packed).items() if name not in _OWN})
    return layer.train(packed.training)


# ---------------------------------------------------------------- what can be packed


# The reason that weights of `nn.MultiheadAttention` are not packed: it reads them without calling a linear layer.
IN_ATTENTION = "nn.MultiheadAttention multiplies it without calling a layer"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear` or of a subclass, with its own weight, or transformers' Conv1D."""
    return (isinstance(module, nn.Linear) and not isinstance(module, PackedLayer)) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D (y = x @ W + bias, W [in, out]), which need not be installed."""
    return (type(module).__module__, type(module).__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def sizes(linear: nn.Module) -> tuple[int, int]:
    """(in features, out features) of a linear layer."""
    return (linear.nx, linear.nf) if _is_conv1d(linear) else (linear.in_features, linear.out_features)


def obstacle(linear: nn.Module) -> str | None:
    """The reason that a packed layer cannot replace this linear layer with equal behaviour; None if it can."""
    if parametrize.is_parametrized(linear):
        return f"parametrised: {', '.join(linear.parametrizations)}"
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        return IN_ATTENTION
    if not (type(linear) is nn.Linear or _is_conv1d(linear)):
        kind = type(linear)
        name = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"  # as of torch.ao's QAT
        return f"class {name} is a subclass of Linear"
    extra = [*(linear._parameters.keys() - {"weight", "bias"}), *linear._buffers, *linear._modules]
    if extra:  # weight_norm, spectral_norm and pruning add some, for example
        return f"it holds more than weight and bias: {', '.join(sorted(extra))}"
    if odd := _odd_tensors(linear):
        return odd
    if hook := next((what for name, what in _REFUSED_HOOKS.items() if getattr(linear, name)), None):
        return f"it has {hook}"
    if "_hf_hook" in vars(linear):
        return "accelerate has replaced its forward (device_map, cpu_offload): pack before, or while loading"
    for name in _attributes(linear):
        if hasattr(type(linear), name) or hasattr(PackedLinear, name) or name in _OWN:
            return f"its attribute {name!r} stands in the way of the class's"
    return None


def _odd_tensors(linear: nn.Module) -> str | None:
    inner, outer = sizes(linear)
    shapes = {"weight": (inner, outer) if _is_conv1d(linear) else (outer, inner), "bias": (outer,)}
    for name, shape in shapes.items():
        tensor = linear._parameters.get(name)
        if tensor is None and name == "bias":
            continue
        if type(tensor) is not nn.Parameter:  # a DTensor, or another library's packed weight
            return f"its {name} is a {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return f"its {name} has the layout {_name_of(tensor.layout)}"
        if tuple(tensor.shape) != shape:
            return f"its {name} has shape {tuple(tensor.shape)}"
    dtype = linear.weight.dtype
    return None if dtype in FLOAT_DTYPES else f"dtype {str(dtype).removeprefix('torch.')}"


def _name_of(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.")


def _attributes(linear: nn.Module) -> dict[str, Any]:
    """The attributes that were set on a layer, except for those of every linear layer."""
    standard = vars(nn.Module()).keys() | (set() if _is_conv1d(linear) else {"in_features", "out_features"})
    return {name: value for name, value in vars(linear).items() if name not in standard}


# The attributes of packed layers.
_OWN = vars(PackedLinear(1, 1, LayerFormat("mxfp8", None), None)).keys() | {*BUFFERS}


# ---------------------------------------------------------------- torch's transformer encoders


def leave_fast_paths(model: nn.Module) -> None:
    """Make torch's transformer encoders call their packed layers.

    In inference, they take a fast path that reads `linear1.weight` and calls no linear layer, and pass nested tensors.
    The two attributes set here switch off both, as torch does where the fast path does not apply.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if any(isinstance(child, PackedLayer) for child in module.children()):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(isinstance(m, PackedLayer) for m in module.modules()):
            module.use_nested_tensor = False
