"""Models whose weights are stored packed: `pack_` in place, `save_packed` and `load_packed` with safetensors.

The backend keeps packed weights beside the parameters; `pack_` puts them in the parameters' place, so that the memory
goes down too. A packed layer computes what the compiled layer would, with the same bits, eagerly and compiled.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any

import torch
from torch import nn

from fp4compile import formats
from fp4compile.formats import BlockFormat
from fp4compile.layouts import ceil_div
from fp4compile.ops import FLOAT_DTYPES
from fp4compile.passes.find import module_name
from fp4compile.passes.plan import Layer, Model, of_layer
from fp4compile.recipe import Recipe
from fp4compile.recipe_io import resolve
from fp4compile.report import Report, Row

_METADATA = "fp4compile"
_BUFFERS = ("weight_data", "weight_scales", "weight_outer")


@dataclass(frozen=True)
class LayerFormat:
    """How a packed layer multiplies: its weight's format, its activation's (None: as it comes), and that one's static
    outer scale (None: computed). Raises ValueError for formats that do not exist or cannot be multiplied."""

    weight: str
    activation: str | None
    activation_outer: float | None = None

    def __post_init__(self):
        weight = formats.get(self.weight)
        if self.activation is not None and not formats.compatible(formats.get(self.activation), weight):
            raise ValueError(f"formats {self.activation} and {self.weight} cannot be multiplied")


class PackedLinear(nn.Module):
    """A linear layer for inference whose weight is block-scaled: y = x @ W^T + bias.

    weight_data, weight_scales, weight_outer: buffers as in `BlockScaled`; absent ones are None. bias: [out] or None.
    Raises RuntimeError where a gradient would have to pass through it.
    """

    def __init__(self, in_features: int, out_features: int, layer_format: LayerFormat, bias: nn.Parameter | None):
        super().__init__()
        self.in_features, self.out_features, self.layer_format = in_features, out_features, layer_format
        self.bias = bias
        for name in _BUFFERS:
            self.register_buffer(name, None)

    @classmethod
    def pack(cls, linear: nn.Linear, layer_format: LayerFormat) -> "PackedLinear":
        """The packed form of a linear layer, quantised along its in features."""
        packed = cls(linear.in_features, linear.out_features, layer_format, linear.bias)
        weight = linear.weight.detach()
        tensors = torch.ops.fp4compile.quantize(weight, layer_format.weight)
        packed._put(formats.get(layer_format.weight), tensors)
        packed.train(linear.training)
        return packed

    def _put(self, fmt: BlockFormat, tensors: tuple[torch.Tensor, ...]) -> None:
        present = (True, fmt.scale is not None, fmt.outer is not None)
        for name, tensor, there in zip(_BUFFERS, tensors, present, strict=True):
            setattr(self, name, tensor if there else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("a packed layer has no gradient: run it under torch.no_grad() or torch.inference_mode()")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.ops.fp4compile.scaled_mm(
            *self._activation(x), self.layer_format.activation,
            self.weight_data, self.weight_scales, self.weight_outer, self.layer_format.weight, bias, x.dtype,
        ).view(*x.shape[:-1], self.out_features)  # fmt: skip

    def _activation(self, x: torch.Tensor) -> tuple:
        x = x.reshape(-1, self.in_features)
        if self.layer_format.activation is None:
            return x, None, None
        fmt, outer = formats.get(self.layer_format.activation), None
        if self.layer_format.activation_outer is not None:
            outer = torch.full((), self.layer_format.activation_outer, device=x.device)
        data, scales, computed = torch.ops.fp4compile.quantize(x, fmt.name, outer=outer)
        return data, scales if fmt.scale else None, outer if outer is not None else computed if fmt.outer else None

    def get_extra_state(self) -> dict[str, Any]:
        return asdict(self.layer_format) | {"in_features": self.in_features, "out_features": self.out_features}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if state != self.get_extra_state():
            raise ValueError(f"packed layer: the state is of {state}, the layer is {self.get_extra_state()}")

    def extra_repr(self) -> str:
        activation = self.layer_format.activation or "as it comes"
        return f"{self.in_features}, {self.out_features}, weight={self.layer_format.weight}, activation={activation}"


# ---------------------------------------------------------------- packing a model


def pack_(model: nn.Module, recipe: str | dict | Recipe | None = None) -> Report:
    """Replace the linear layers that a recipe quantises by packed ones, in place, freeing each weight as it goes.

    recipe: as for `fp4compile.backend`; of it, the forward product counts. Only modules of type `nn.Linear` are
        packed. A weight that another module shares stays with that module.

    Returns a report of what was packed and why the rest was not. Raises what `backend` raises for a bad recipe.
    """
    chosen = resolve(recipe)
    report = Report(chosen.name)
    shared = _shared_parameters(model)
    layers = [Layer(name, (1, linear.out_features, linear.in_features)) for name, linear in _linears(model)]
    around = Model.of(chosen, [name for name, _ in model.named_parameters()], layers)
    for name in [name for name, _ in _linears(model)]:  # a list of the modules would keep their weights
        linear = model.get_submodule(name)
        layer_format = _layer_format(name, linear, chosen, around, id(linear.weight) in shared)
        if isinstance(layer_format, LayerFormat):
            _replace(model, name, PackedLinear.pack(linear, layer_format))
        report.add([_row(name, linear, layer_format)], {})
        del linear
    return report


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)


def _shared_parameters(model: nn.Module) -> set[int]:
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def _layer_format(name: str, linear: nn.Linear, recipe: Recipe, around: Model, shared: bool) -> LayerFormat | str:
    """The format that a layer is packed in, or why it is not."""
    if linear.weight.dtype not in FLOAT_DTYPES:
        return f"dtype {str(linear.weight.dtype).removeprefix('torch.')}"
    # The number of tokens is unknown here and counts as enough.
    layer = Layer(module_name(f"{name}.weight"), (recipe.min_m, linear.out_features, linear.in_features), shared)
    layer_recipe, reason = of_layer(layer, recipe, around)
    if reason is not None:
        return reason
    if layer_recipe.fprop_w is None:
        return f"recipe {layer_recipe.name} leaves weights in high precision"
    if layer_recipe.activation_scale == "dynamic":
        return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x)
    outer = recipe.static_scale(name)
    if outer is None:
        return "no calibrated activation scale: run fp4compile.calibrate"
    return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x, outer)


def _row(name: str, linear: nn.Linear, packed: LayerFormat | str) -> Row:
    dims = {"m": None, "n": linear.out_features, "k": linear.in_features, "flops": None}
    if isinstance(packed, str):
        dtype = str(linear.weight.dtype).removeprefix("torch.")
        return Row(name, "fprop", left=None, right=dtype, tier=None, reason=packed, **dims)
    return Row(name, "fprop", left=packed.activation, right=packed.weight, tier=None, reason=None, **dims)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    if not name:
        raise ValueError("model: a single linear layer cannot be replaced in place; put it into a module")
    setattr(model.get_submodule(parent), child, module)


# ---------------------------------------------------------------- files


def save_packed(model: nn.Module, path: str | PathLike) -> None:
    """Write the state of a model, packed layers included, to a safetensors file. Tensors that share memory are written
    once. Raises ValueError if the model has no packed layer."""
    from safetensors.torch import save_file

    layers = {name: m.get_extra_state() for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    if not layers:
        raise ValueError("model: has no packed layer; call fp4compile.pack_ first")
    tensors, aliases, first = {}, {}, {}
    for name, tensor in _tensors(model).items():
        place = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = _storable(tensor.detach()).contiguous()
    save_file(tensors, path, {_METADATA: json.dumps({"layers": layers, "aliases": aliases})})


def load_packed(model: nn.Module, path: str | PathLike) -> None:
    """Give an unpacked model of the same architecture the packed layers and tensors of a file, in place.

    Everything is checked before the model is touched. Raises ValueError for a file that is truncated or was not made
    by `save_packed`, for layers that the model does not have or that have other sizes, and for missing tensors.
    """
    layers, stored = _read(path)
    packed = {name: _empty_layer(model, name, state) for name, state in layers.items()}
    expected = _expected(model, packed)
    for name, (shape, dtype) in expected.items():
        if name not in stored:
            raise ValueError(f"{path}: tensor {name!r} is missing")
        found = stored[name]
        if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            raise ValueError(
                f"{path}: tensor {name!r} is {found.dtype} {tuple(found.shape)}, the model needs {dtype} {tuple(shape)}"
            )
    unknown = sorted(set(stored) - set(expected))
    if unknown:
        raise ValueError(f"{path}: the model has no {unknown[0]!r}")
    for name, module in packed.items():
        device = model.get_submodule(name).weight.device
        module.to(device)
        for buffer in _BUFFERS:
            tensor = stored.get(f"{name}.{buffer}")
            setattr(module, buffer, None if tensor is None else tensor.to(device))
        _replace(model, name, module)
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(stored[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Scales and FP8 codes as bytes: not every reader knows their types."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor


def _read(path: str | PathLike) -> tuple[dict[str, dict], dict[str, torch.Tensor]]:
    """(state of the packed layers, tensors by name) of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = (file.metadata() or {}).get(_METADATA)
            if metadata is None:
                raise ValueError(f"{path}: was not written by fp4compile.save_packed")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    layers, aliases = _parse(path, metadata)
    for name, source in aliases.items():
        if source not in tensors:
            raise ValueError(f"{path}: tensor {source!r}, which {name!r} shares, is missing")
        tensors[name] = tensors[source]
    for name, state in layers.items():
        fmt = formats.get(state["weight"])
        for buffer, dtype in (("weight_data", fmt.data_dtype), ("weight_scales", fmt.scale_dtype)):
            if f"{name}.{buffer}" in tensors:
                tensors[f"{name}.{buffer}"] = tensors[f"{name}.{buffer}"].view(dtype)
    return layers, tensors


def _parse(path: str | PathLike, metadata: str) -> tuple[dict[str, dict], dict[str, str]]:
    """(state of the packed layers, tensors that share another's memory) of a file's metadata."""
    keys = {field.name for field in fields(LayerFormat)} | {"in_features", "out_features"}
    try:
        content = json.loads(metadata)
        layers, aliases = content["layers"], content["aliases"]
        whole = all(set(state) == keys for state in layers.values()) and isinstance(aliases, dict)
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: its metadata is not what fp4compile.save_packed writes")
    return layers, aliases


def _empty_layer(model: nn.Module, name: str, state: dict[str, Any]) -> PackedLinear:
    """The packed layer of a stored state, without its tensors. ValueError if the model's layer is no match."""
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the model has no layer {name!r}") from None
    if type(linear) is not nn.Linear:
        raise ValueError(f"layer {name!r}: expected an nn.Linear to replace, the model has {type(linear).__name__}")
    sizes = (state["in_features"], state["out_features"])
    if (linear.in_features, linear.out_features) != sizes:
        have = (linear.in_features, linear.out_features)
        raise ValueError(f"layer {name!r}: the file has in and out features {sizes}, the model {have}")
    layer_format = LayerFormat(state["weight"], state["activation"], state["activation_outer"])
    return PackedLinear(*sizes, layer_format, linear.bias).train(linear.training)


def _expected(model: nn.Module, packed: dict[str, PackedLinear]) -> dict[str, tuple]:
    """Shape and dtype of every tensor that the packed model will have."""
    expected = {name: (value.shape, value.dtype) for name, value in _tensors(model).items()}
    for name, layer in packed.items():
        del expected[f"{name}.weight"]
        fmt = formats.get(layer.layer_format.weight)
        blocks = ceil_div(layer.in_features, fmt.block_cols)
        cols = blocks * fmt.block_cols // (2 if fmt.packed else 1)
        expected[f"{name}.weight_data"] = ((layer.out_features, cols), fmt.data_dtype)
        if fmt.scale:
            rows = ceil_div(layer.out_features, fmt.block[0])
            expected[f"{name}.weight_scales"] = ((rows, blocks), fmt.scale_dtype)
        if fmt.outer:
            shape = (layer.out_features, 1) if fmt.outer == "row" else ()
            expected[f"{name}.weight_outer"] = (shape, torch.float32)
    return expected
