"""`PackedWeight`, the base class of packed layers and packed experts: a block-scaled weight in buffers of a module."""

import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fp4compile import _compat, _inductor_patches
from fp4compile.analysis.module_names import check_module, name_in_state
from fp4compile.formats import formats, reference_scales
from fp4compile.formats.formats import as_integers, integer_dtype
from fp4compile.formats.grouping import grouping_of
from fp4compile.formats.quantize_spec import FLOAT_DTYPES, ROWS, QuantizeSpec
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.report.decibels import decibels
from fp4compile.weights import (
    flop_formulas,  # noqa: F401 (registers them)
    gptq,
)
from fp4compile.weights.scale_checks import check_static, warn_below_range
from fp4compile.weights.scale_layout import laid_out, layout_on
from fp4compile.weights.static_scale import static_scale

# The hooks that may read or write a weight in a state dict, so that its layer or module is not packed.
STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
BUFFERS = ("weight_data", "weight_scales", "weight_outer")
# Rules of earlier versions for block scales, in files. By the present rule only later writes to a layer are quantised.
_EARLIER_RULES = {"four_over_six": "mse", "four_over_six_mae": "mse", "four_over_six_448": "mse"}
Part = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a buffer
_DESCRIPTION = "_extra_state"  # the description's name in state dicts
SHARDED = ("weight_data", "weight_scales")  # row scales are few, and a global scale has no rows


@dataclass(frozen=True)
class LayerFormat:
    """The formats of a packed layer's matmul.

    weight, activation: names of formats; activation None leaves it unquantised. activation_outer: the static global
    scale of the activation; None computes it. scale_rule: the rule for the weight's block scales, see
    `reference_scales`.

    Raises ValueError for formats that cannot be multiplied, and for a scale or a rule that the formats do not support.
    """

    weight: str
    activation: str | None
    activation_outer: float | None = None
    scale_rule: str = "amax"

    def __post_init__(self) -> None:
        weight = formats.get(self.weight)
        dtypes_in(self.weight)  # now, and not when Dynamo traces the layer
        formats.check_scale_rule("scale_rule", self.scale_rule, [weight])
        if self.activation is not None and not formats.compatible(formats.get(self.activation), weight):
            raise ValueError(f"formats {self.activation} and {self.weight} cannot be multiplied")
        if self.activation_outer is not None:
            check_static(self.activation_outer)
            if self.activation is None or formats.get(self.activation).outer != "tensor":
                raise ValueError(f"activation_outer: activations in {self.activation} have no global scale")


class PackedWeight(nn.Module):
    """A module with a block-scaled weight in buffers: a matrix [out_features, in_features], or one for each expert.

    weight_data, weight_scales, weight_outer: buffers as the fields of `BlockScaled`; None if the format has none. Codes
        and block scales are integers here, in state dicts and in files, because loaders cast floats to the model's
        dtype and never cast integers; `parts` views them. Block scales have the layout of the device, see
        `weights.scale_layout`, and are linear in state dicts. `make_shardable` turns codes and scales into parameters.
    experts: the number of matrices; None for a single one. in_first: whether the original weight is [..., in, out].
    weight_dtype: the dtype of the dequantised weight: the original weight's, until a cast such as `.half()` sets it.
    """

    weight_data: Any
    weight_scales: Any
    weight_outer: Any
    experts: int | None = None  # older pickles, without packed experts, lack it
    _static: torch.Tensor | None  # the static global scale of the activation, on the device of the weight

    def __init__(
        self, experts: int | None, in_features: int, out_features: int, layer_format: LayerFormat,
        weight_dtype: torch.dtype, in_first: bool,
    ):  # fmt: skip
        nn.Module.__init__(self)  # the next class may be `nn.Linear`, which would create a weight
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.layer_format, self.weight_dtype, self.in_first = layer_format, weight_dtype, in_first
        for name in BUFFERS:
            self.register_buffer(name, None)
        self._stand_for_description()
        self.keep_static_scale()

    def _stand_for_description(self) -> None:
        """Add an empty buffer, where loaders that set tensors one by one look for the state dict's `_extra_state`."""
        self._buffers[_DESCRIPTION] = None
        self._non_persistent_buffers_set.add(_DESCRIPTION)

    @property
    def _extra_state(self) -> torch.Tensor:
        """The description as a tensor of JSON's bytes, because programs that save state dicts expect tensors.

        It ends with a new line, which states of earlier versions lack: loaders that compare shapes refuse these, whose
        FP8 numbers they would cast.
        """
        text = json.dumps(self.description, sort_keys=True, separators=(",", ":")) + "\n"
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")

    def store(self, weight: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        """Quantise a weight along the in features, each expert separately, after autocast's cast.

        amax: float32 [], of which the global scale is made; None computes the weight's.

        Raises RuntimeError for a shardable layer, because FSDP2 would lose a write to a gathered weight.
        """
        weight = self._taken(weight)
        dim, rule = -2 if self.in_first else -1, self._scale_rule
        given: dict[str, torch.Tensor] = {}
        if amax is not None:
            amax = amax.to(weight.device)
            given = {"amax": amax} if rule == "amax" else {"outer": reference_scales.outer_of(amax)}
        layout, each = self.scale_layout_on(weight.device), self.experts is not None
        data, scales, outer = QUANTIZE(
            weight, self._format, dim, layout=layout, scale_rule=rule, each_matrix=each, **given
        )  # fmt: skip
        self._keep(weight.movedim(dim, -1), data, scales, given.get("outer", outer))

    def fit(self, weight: torch.Tensor, moments: gptq.Moments, amax: torch.Tensor | None) -> None:
        """`store`, with codes by `gptq.quantize`. A weight that is not finite is stored by `store`."""
        taken = self._taken(weight)
        if not taken.isfinite().all():
            self.store(weight, amax)
            return
        fmt, layout = formats.get(self._format), self.scale_layout_on(taken.device)
        matrices = taken.mT if self.in_first else taken
        each = matrices if self.experts is not None else matrices[None]
        found = gptq.quantize(each, moments, fmt, self._scale_rule, layout=layout, amax=amax)
        if self.experts is None:
            found = tuple(None if part is None else part[0] for part in found)  # type: ignore[assignment]
        self._keep(matrices, *found)

    def _taken(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as it is quantised, after autocast's cast. Raises RuntimeError for a shardable layer."""
        if "weight_data" in self._parameters:  # `make_shardable` was called
            raise RuntimeError("weight: a layer that is sharded takes no other weight; merge adapters before it is")
        weight = weight.detach()
        dtype = autocast_dtype(weight.device)
        return weight if dtype is None else weight.to(dtype)

    def _keep(
        self, weight: torch.Tensor, data: torch.Tensor, scales: torch.Tensor | None, outer: torch.Tensor | None
    ) -> None:
        """Set the buffers to the codes of a weight [..., N, K]."""
        fmt = formats.get(self._format)
        warn_below_range(weight, data, scales, fmt)
        self.weight_data = data
        self.weight_scales = scales if fmt.scale else None
        self.weight_outer = outer if fmt.outer else None
        self.keep_static_scale()

    def keep_static_scale(self) -> None:
        """Put the static global scale of the activation on the device of the weight."""
        value = self._activation_outer
        device = torch.device("cpu") if self.weight_data is None else self.weight_data.device
        # No buffer, because loaders and broadcasts that fill a module's buffers do not have the scale's value.
        self._static = None if value is None else static_scale(value, device)

    def activation_outer_on(self, device: torch.device) -> torch.Tensor | None:
        """The static global scale of the activation on a device, float32 []; None where the scale is computed."""
        if torch.compiler.is_compiling():  # an input of the graph; the number would be a constant in it
            kept = self._static
            return kept if kept is None or kept.device == device else kept.to(device)
        value = self._activation_outer
        return None if value is None else static_scale(value, device)  # of the mode that may be active

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Codes and block scales may have the format's dtype or the integers of a buffer."""
        bits = name in SHARDED and isinstance(value, torch.Tensor)
        super().__setattr__(name, as_integers(value) if bits else value)

    def make_shardable(self) -> None:
        """Turn codes and block scales into frozen parameters: FSDP2 shards only parameters, and casts no integers."""
        for name in SHARDED:
            tensor = self._buffers.pop(name, None)
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            elif name not in self._parameters:
                self.register_buffer(name, None)

    def parts(self) -> list[torch.Tensor | None]:
        """Codes, block scales and outer scales in the dtypes of the weight's format; see `typed`."""
        return typed(self._format, *(getattr(self, name) for name in BUFFERS))

    def dequantised(self) -> torch.Tensor:
        """The contiguous weight in the original parameter's shape, in weight_dtype."""
        # No property is read: see `layer_format`.
        dtype = getattr(torch, self._weight_dtype)
        given = *self.parts(), self._format, self.in_features, dtype if dtype in FLOAT_DTYPES else torch.float32
        tokens: tuple = ()
        if self.experts is not None:
            tokens = self._activation or "plain", self.activation_outer_on(self.weight_data.device)
        weight = torch.ops.fp4compile.dequantize(*given, *tokens).to(dtype)
        return weight.mT.contiguous() if self.in_first else weight

    def read(self) -> torch.Tensor:
        """`dequantised`, for the module's readers. In eager mode, a write to the tensor packs again."""
        if torch.compiler.is_compiling():
            return self.dequantised()
        with torch.inference_mode(False), torch.no_grad():  # inference tensors do not count writes
            return DequantizedWeight.of(self, self.dequantised())

    def store_again(self, values: torch.Tensor) -> None:
        """Quantise new values, of `dequantised`'s shape, by the layer's format and rule, and warn of the error."""
        self.store(values)
        wanted, got = values.detach().float(), self.dequantised().detach().float()
        sqnr = decibels(float(wanted.square().sum()), float((wanted - got).square().sum()))
        # Whole decibels, because Python prints warnings of equal text once, and a merged model has hundreds of layers.
        warnings.warn(
            "a packed layer was given other weights, as by the merging of an adapter, and packed them again in "
            f"{self._format}: SQNR {sqnr:.0f} dB",
            stacklevel=3,
        )

    @property
    def layer_format(self) -> LayerFormat:
        """The formats of the layer's matmul."""
        return LayerFormat(self._format, self._activation, self._activation_outer, self._scale_rule)

    @layer_format.setter
    def layer_format(self, chosen: LayerFormat) -> None:
        # Numbers and names in the module's own attributes. A guard on another object's attribute, or on a property,
        # would keep Dynamo from passing over the guards of this module and of the modules around it
        # (`use_recursive_dict_tags_for_guards`); and torch's stored graphs lose objects that no guard reads.
        self._format, self._activation = chosen.weight, chosen.activation
        self._activation_outer, self._scale_rule = chosen.activation_outer, chosen.scale_rule

    @property
    def weight_dtype(self) -> torch.dtype:
        """See the class. It is kept as a name, because torch's stored graphs lose dtypes that are attributes."""
        return getattr(torch, self._weight_dtype)

    @weight_dtype.setter
    def weight_dtype(self, dtype: torch.dtype) -> None:
        self._weight_dtype = str(dtype).removeprefix("torch.")

    @property
    def scale_layout(self) -> str:
        """The current layout of the block scales, "linear" or "swizzled"."""
        return layout_of(self.weight_scales, experts=self.experts is not None)

    def _apply(self, fn: Callable, recurse: bool = True) -> "PackedWeight":
        """Move and cast the module like any other, except that codes and scales are not cast."""
        device = None if self.weight_data is None else self.weight_data.device
        with torch.no_grad():
            probe = fn(torch.empty(0, dtype=self.weight_dtype, device=device))
        moved = {name: tensor for name in BUFFERS if (tensor := self._buffers.get(name)) is not None}
        if "weight_scales" in moved and self.scale_layout_on(probe.device) == "linear":
            # The scales are converted before the move, because a copy to the CPU may still be in progress after it.
            moved["weight_scales"] = self.scales_as("linear", self.weight_scales)
        # A cast of a module casts only floating-point tensors, so codes and scales are passed as integers.
        hidden = {name: as_integers(tensor) for name, tensor in moved.items()}
        self._buffers.update(hidden)
        try:
            super()._apply(fn, recurse)
        finally:
            for name, tensor in moved.items():
                self._buffers[name] = _uncast(tensor, hidden[name], self._buffers[name])
        self.lay_out_scales()
        self.weight_dtype = probe.dtype if probe.dtype.is_floating_point else self.weight_dtype
        return self

    def scale_layout_on(self, device: torch.device) -> str:
        """The layout of the block scales on a device, "linear" or "swizzled"."""
        formats_of = self._activation, self._format
        return layout_on(device, *formats_of, self.out_features, self.in_features, self.experts)

    def scales_as(self, layout: str, scales: torch.Tensor) -> torch.Tensor:
        """Block scales of this layer's weight in a layout; returned unchanged where their shape does not fit."""
        shape, _ = buffer_shapes(self)["weight_scales"]
        return laid_out(scales, formats.get(self._format), self.out_features, shape, layout)

    def lay_out_scales(self) -> None:
        """Convert the block scales of an unsharded layer, and its static scale, to the device."""
        scales = self._buffers.get("weight_scales")
        if scales is not None:
            self._buffers["weight_scales"] = self.scales_as(self.scale_layout_on(scales.device), scales)
        self.keep_static_scale()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_static": None}  # recomputed from the layer's format

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in {"layer_format", "weight_dtype"} & vars(self).keys():  # of older pickles
            setattr(self, name, self.__dict__.pop(name))
        self._scale_rule = present_rule(self._scale_rule)
        outer = self._buffers.get("weight_outer")
        if outer is not None:  # older pickles have it as integers, and no buffer for the description
            self._buffers["weight_outer"] = outer.view(torch.float32)
        self._stand_for_description()
        self.lay_out_scales()  # the file may have been written on another device

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _DESCRIPTION] = self._extra_state
        # A rank's rows keep their layout: linear scales cannot be made of a part. `_as_stored` takes both layouts.
        if self.scale_layout == "swizzled" and not _is_shard(self.weight_scales):
            # Inference tensors, because a write to the linear scales would not change the layer, and now raises.
            with torch.inference_mode():
                destination[f"{prefix}weight_scales"] = self.scales_as("linear", self.weight_scales)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        problem = self._misfit(state_dict, prefix)
        if problem is not None:  # load no buffer
            errors.append(f"packed layer {prefix.removesuffix('.')!r}: {problem}")
            return
        state_dict = self._as_stored(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
        )  # fmt: skip
        self.lay_out_scales()  # assign=True may have assigned scales on another device

    def _as_stored(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
        """A state dict with this layer's tensors as bytes, in the layer's layout, without the description."""
        found = {name: tensor for name in SHARDED if (tensor := state_dict.get(prefix + name)) is not None}
        for name, tensor in found.items():
            if not _is_shard(tensor):
                tensor = as_integers(tensor)
                found[name] = self.scales_as(self.scale_layout, tensor) if name == "weight_scales" else tensor
        kept = {name: value for name, value in state_dict.items() if name != prefix + _DESCRIPTION}
        return kept | {prefix + name: tensor for name, tensor in found.items()}

    def _misfit(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """The reason that a state does not fit this layer; None if it does. `nn.Module` itself checks shapes."""
        if f"{prefix}weight" in state_dict:
            return "the state has its weight unpacked; load the state before fp4compile.pack_"
        state, mine = described(state_dict.get(prefix + _DESCRIPTION)), self.description
        rule = mine["scale_rule"] if state is None else present_rule(state.get("scale_rule", mine["scale_rule"]))
        if state is not None and state | {"scale_rule": rule} != mine:
            return f"the state is of {state}, the layer is {mine}"
        for name in BUFFERS:
            given, dtypes = state_dict.get(prefix + name), dtypes_in(self._format)[name]
            # States of earlier versions have floats in the format's dtype.
            if given is not None and given.dtype not in dtypes:
                return f"{name} is {given.dtype} in the state, the layer has {dtypes[0]}"
        return None

    @property
    def description(self) -> dict[str, Any]:
        """The layer's format and sizes, which files of packed models hold."""
        found = asdict(self.layer_format) | {"in_features": self.in_features, "out_features": self.out_features}
        return found if self.experts is None else found | {"experts": self.experts, "in_first": self.in_first}

    def extra_repr(self) -> str:
        experts = "" if self.experts is None else f"{self.experts} experts, "
        return (f"{experts}{self.in_features}, {self.out_features}, weight={self._format}, "
                f"activation={self._activation or 'as it comes'}")  # fmt: skip


_inductor_patches.leave_buffers_out_of_ddp(PackedWeight)


class DequantizedWeight(torch.Tensor):
    """A copy of a packed weight's dequantised values, or a view of the copy.

    Every eager write (`data`, in place, `out=`, through views) quantises the written values and stores them in the
    layer. Results of operations, copies and pickles are plain tensors. An array of NumPy over the memory is read-only.

    _codes: the layer's codes of these values. _viewed: for a view, the weight whose memory it shares.
    """

    _layer: PackedWeight
    _codes: torch.Tensor
    _viewed: "DequantizedWeight | None" = None
    _is_hf_initialized = True  # transformers gives no initial values to a tensor that has this mark

    @staticmethod
    def of(layer: PackedWeight, values: torch.Tensor) -> "DequantizedWeight":
        weight = torch.Tensor._make_subclass(DequantizedWeight, values)
        weight._layer, weight._codes = layer, layer.weight_data
        return weight

    def packed_in(self, layer: PackedWeight) -> bool:
        """Whether this is the layer's own weight; packs it again if its values have changed."""
        if self._layer is layer and self._viewed is None and self._codes is not layer.weight_data:
            self._pack()
        return self._layer is layer and self._viewed is None

    def _pack(self) -> None:
        self._layer.store_again(self)
        self._codes = self._layer.weight_data

    @property
    def _whole(self) -> "DequantizedWeight":
        return self if self._viewed is None else self._viewed

    @property
    def data(self) -> torch.Tensor:
        """The dequantised values; `weight.data += x` and `weight.data = x` pack the sum, or x."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values is self:  # the end of `weight.data += x`
            return
        if self is not self._whole:
            raise RuntimeError("weight: a view of a packed layer's weight takes no other data; copy_ writes to it")
        if values.shape != self.shape:
            raise ValueError(f"weight: expected shape {tuple(self.shape)}, got {tuple(values.shape)}")
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, values.detach().as_subclass(torch.Tensor))
            self._pack()

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """Raise RuntimeError: torch sets this attribute in `nn.Parameter(weight)`.

        The parameter would share the memory of this dequantised copy, and no write to it would reach the layer.
        """
        raise RuntimeError("weight: a packed layer's weight is no parameter; nn.Parameter(weight.clone()) is one")

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # a graph would lose a write
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            wholes = {id(each._whole): each._whole for each in inputs}.values()
            before = [(whole, whole._version) for whole in wholes]
            result = func(*args, **kwargs)
            for whole, version in before:
                if whole._version != version:
                    if whole.grad_fn is not None:  # values with a gradient were written to it
                        whole.detach_()
                    whole._pack()
            if hasattr(result, "setflags"):
                result.setflags(write=False)
            of_memory = {whole.untyped_storage()._cdata: whole for whole in wholes}
            if isinstance(result, torch.Size):  # a tree that would become a plain tuple
                return result
            return tree_map_only(torch.Tensor, lambda each: _as_view(each, of_memory), result)


def _as_view(result: torch.Tensor, of_memory: dict[int, DequantizedWeight]) -> torch.Tensor:
    """A result of an operation, as a view of the weight whose memory it shares."""
    if type(result) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(result):
        return result
    whole = of_memory.get(result.untyped_storage()._cdata) if result.layout == torch.strided else None
    if whole is None:
        return result
    view = result.as_subclass(DequantizedWeight)
    view._layer, view._viewed = whole._layer, whole
    return view


def make_shardable_(model: nn.Module) -> None:
    """Let FSDP2 shard a model's packed weights: call it before `fully_shard`, with the model on its device.

    Codes and block scales become frozen parameters of integers; global and row scales stay buffers. Results keep their
    bits.

    Raises TypeError if `model` is no module, ValueError if it has no packed layer, RuntimeError under a torch whose
    FSDP2 shards no integers (before 2.13).
    """
    packed = packed_in(model)
    if not _compat.SHARDS_INTEGERS:
        raise RuntimeError(f"torch {torch.__version__}: its fully_shard takes no parameters of integers; 2.13 does")
    for layer in packed.values():
        layer.make_shardable()


def packed_in(model: nn.Module) -> dict[str, PackedWeight]:
    """`packed_modules` of a model. Raises TypeError if it is no module, ValueError if it has none."""
    check_module(model)
    found = packed_modules(model)
    if not found:
        raise ValueError("model: has no packed layer; call fp4compile.pack_ first")
    return found


def packed_modules(model: nn.Module) -> dict[str, PackedWeight]:
    """The packed weights of a model by every name that state dicts have for them; empty if it has none."""
    named = model.named_modules(remove_duplicate=False)
    return {name_in_state(name): module for name, module in named if isinstance(module, PackedWeight)}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model by name: the objects, not detached copies."""
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not is_extra_state(key)}


def tensors_to_write(model: nn.Module) -> dict[str, torch.Tensor]:
    """`tensors_of` a model. Raises ValueError where one is sharded or on the meta device."""
    found = tensors_of(model)
    for name, tensor in found.items():
        if _is_shard(tensor):
            raise ValueError(f"model: {name!r} is sharded, and this rank has a part of it: load the gathered state "
                             "(get_model_state_dict, full_state_dict=True) into an unsharded packed model, and write "
                             "that")  # fmt: skip
        if tensor.is_meta:
            raise ValueError(f"model: {name!r} is on the meta device and has no values to write")
    return found


def _is_shard(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; torch may have been built without torch.distributed."""
    return hasattr(tensor, "_local_tensor")


def is_extra_state(key: str) -> bool:
    """Whether a key of a state dict names a module's extra state."""
    return key.rpartition(".")[2] == "_extra_state"


def present_rule(rule: Any) -> Any:
    """A rule for block scales as a file or a pickle names it; of the rules of earlier versions, the present one."""
    return _EARLIER_RULES.get(rule, rule) if isinstance(rule, str) else rule


def described(state: Any) -> dict[str, Any] | None:
    """The description in an extra state: JSON's bytes, or the dictionary that it was in version 0.1."""
    if not isinstance(state, torch.Tensor):
        return state if isinstance(state, dict) else None
    try:
        return json.loads(bytes(state.tolist()))
    except ValueError:
        return {"unreadable": True}


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts operands on a device; None if autocast is off, and for the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _uncast(before: torch.Tensor, hidden: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """View a buffer in its own dtype again. hidden: it as integers. after: `hidden` after a module's `_apply`."""
    if after is hidden:
        return before
    if after.dtype != hidden.dtype:  # `Module.type` casts integers too
        return before.to(after.device)
    return after.view(before.dtype)


# The results of `dtypes_in`, by format. Dynamo reads a dictionary at once, and warns of a function with a cache.
_DTYPES: dict[str, dict[str, tuple[torch.dtype, torch.dtype]]] = {}


def dtypes_in(format: str) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The dtype of each of `BUFFERS` in a format, and the dtype in which the buffer and a file store it, by name."""
    if format not in _DTYPES:
        fmt = formats.get(format)
        codes, scales = fmt.data_dtype, fmt.scale_dtype
        each = (codes, integer_dtype(codes)), (scales, integer_dtype(scales)), (torch.float32, torch.float32)
        _DTYPES[format] = dict(zip(BUFFERS, each, strict=True))
    return _DTYPES[format]


def typed(format: str, *buffers: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Codes, block scales and outer scales of a packed weight, viewed in the dtypes of its format; None stays None.

    buffers: the tensors of `BUFFERS`, in their order; None for a buffer that the format lacks.

    Raises RuntimeError if a tensor is a rank's shard, TypeError if a loader has cast it.
    """
    found = []
    for (name, (dtype, stored)), tensor in zip(dtypes_in(format).items(), buffers, strict=True):
        if tensor is not None:
            if _is_shard(tensor):
                raise RuntimeError(
                    "weight: this rank has some of its rows; call the module given to fully_shard, or its unshard(); "
                    "tensor parallelism takes unpacked layers"
                )
            if tensor.dtype != stored:
                raise TypeError(
                    f"{name}: expected {stored}, got {tensor.dtype}: a loader has cast it. Load without a "
                    "dtype (in accelerate dtype=None), or by fp4compile.load_packed into an unpacked model"
                )
            tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
            tensor = tensor if dtype == stored else tensor.view(dtype)
        found.append(tensor)
    return found


def layout_of(scales: torch.Tensor | None, experts: bool) -> str:
    """The layout of block scales: "swizzled" where each matrix has one flat run of them, otherwise "linear"."""
    return "swizzled" if scales is not None and scales.dim() == (2 if experts else 1) else "linear"


def buffer_shapes(layer: PackedWeight) -> dict[str, Part]:
    """The shape and the format's dtype of each buffer of a layer; buffers that its format lacks are missing."""
    each = layer.experts is not None
    shape = (*([layer.experts] if each else []), layer.out_features, layer.in_features)
    parts = zip(BUFFERS, parts_of(layer.layer_format.weight, shape, each_matrix=each), strict=True)
    return {name: part for name, part in parts if part is not None}


@functools.cache  # FSDP2's host thread calls it at every gather
def parts_of(
    format: str, shape: tuple[int, ...], dim: int = ROWS, each_matrix: bool = False
) -> tuple[Part | None, ...]:
    """Shape and dtype of codes, linear block scales, and global or row scales of a tensor; None for missing ones."""
    fmt = formats.get(format)
    spec = QuantizeSpec(fmt, (dim,), grouping=grouping_of(None, each_matrix))
    data, scales, outer = spec.shapes(torch.empty(shape, device="meta"), 0, dim)
    return (
        (data, fmt.data_dtype),
        (scales, fmt.scale_dtype) if fmt.scale else None,
        (outer, torch.float32) if fmt.outer else None,
    )
