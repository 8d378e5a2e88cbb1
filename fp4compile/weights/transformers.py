"""Packed models in transformers' `save_pretrained` and `from_pretrained`: the quantiser for quant_method "fp4compile".

config.json holds the description of every packed layer, so the model on the meta device gets its packed layers before
any weight is read. A checkpoint in high precision is packed by a recipe, each weight as soon as it has been read, so
that there is only one weight in high precision at a time. Of a checkpoint that another library packed, the reader of
`load_packed` reads the packed layers, and transformers all other tensors.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4compile.analysis.module_names import module_name, packed_name
from fp4compile.recipe import resolve
from fp4compile.weights.buffers import (
    BUFFERS,
    PackedWeight,
    buffer_shapes,
    dtypes_in,
    is_extra_state,
    packed_modules,
)
from fp4compile.weights.decide import decisions
from fp4compile.weights.experts import states_of
from fp4compile.weights.linear import leave_fast_paths, obstacle
from fp4compile.weights.published.conventions import CONFIG, HF_QUANT_CONFIG, read_published
from fp4compile.weights.published.expert_modules import in_model, without_unused
from fp4compile.weights.published.expert_names import PublishedNames, names_of_transformers, without_prefixes
from fp4compile.weights.published.shards import Contents, naming, read_checkpoint, read_dtypes
from fp4compile.weights.replacements import METHOD, Weight, check_states, unpacked, weights_of
from fp4compile.weights.scale_checks import check_buffers
from fp4compile.weights.sharing import storable


class Fp4CompileConfig(QuantizationConfigMixin):
    """The quantization_config of a packed model, or of a model to pack while it is loaded.

    layers, experts: the descriptions of the packed layers and experts, by name. recipe: as for `fp4compile.pack_`, for
    checkpoints that are not packed: `quantization_config={"quant_method": "fp4compile", "recipe": "nvfp4"}`.
    published: whether another library packed the checkpoint, whose files describe the layers. expert_dtype is not used:
    transformers' configuration of DeepSeek-V4 adds it to that of every quantised checkpoint.

    Raises TypeError for another key, such as a recipe's field that is not in the dict under `recipe`.
    """

    published = False

    def __init__(
        self,
        layers: dict[str, dict] | None = None,
        experts: dict[str, dict] | None = None,
        quant_method: str = METHOD,
        recipe: str | dict | None = None,
        expert_dtype: Any = None,
        **unknown: Any,
    ):
        if unknown:
            raise TypeError(
                f"quantization_config: unknown key {min(unknown)!r}; the fields of a recipe belong into the dict under "
                "the key 'recipe': {'recipe': 'nvfp4', 'skip_last_blocks': 2}"
            )
        self.quant_method = quant_method  # type: ignore[assignment]  # which is no member of transformers' enum
        self.layers, self.experts = {} if layers is None else layers, {} if experts is None else experts
        self.recipe = recipe

    def get(self, key: str, default: Any = None) -> Any:
        """A field, as of a dict: so transformers reads `quant_method`, also from the configuration of a model."""
        return vars(self).get(key, default)


class PublishedConfig(Fp4CompileConfig):
    """The quantization_config of a checkpoint that another library packed, to be read by `load_packed`'s reader.

    recipe: as for `fp4compile.load_packed`. The other fields are read from the checkpoint's files.
    """

    published = True

    def __init__(self, quant_method: str = METHOD, recipe: str | dict | None = None, **described: Any):
        super().__init__(recipe=recipe)


class Fp4CompileQuantizer(HfQuantizer):
    """Loads and saves packed models, and packs a model by its configuration's recipe while it is loaded.

    waiting: the packed weights of the checkpoint, and the shells in their places. dequantised: the weights of layers of
    the checkpoint that packed layers cannot replace, with the names of the parameters that share each. strays: the
    packed weights that the class lacks without saying so, with the model's block that would have them. unread: the
    weights to pack as they are read, by the names of their parameters. late: the weights to pack when the model has
    been loaded.
    """

    quantization_config: Fp4CompileConfig

    def __init__(self, quantization_config: Fp4CompileConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.waiting: list[tuple[Weight, PackedWeight, _Shell]] = []
        self.dequantised: list[tuple[list[str], torch.Tensor]] = []
        self.strays: dict[str, str] = {}
        self.unread: dict[str, Weight] = {}
        self.late: list[Weight] = []
        self.expected: Any = None  # patterns of tensors that a checkpoint may have besides the model's
        self.dtype: torch.dtype | None = None  # of the loaded weights

    # ------------------------------------------------------------ loading

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ValueError for a superfluous or unfit recipe, and for weights on disk, which cannot be packed."""
        config = self.quantization_config
        if not self.pre_quantized and config.recipe is not None and resolve(config.recipe).needs_batches:
            raise ValueError(
                "quantization_config: its recipe needs batches; load the model without it, and call "
                "fp4compile.pack_(model, recipe, batches=...)"
            )
        if self.pre_quantized and config.recipe is not None and not config.published:
            raise ValueError("quantization_config: the checkpoint is packed already; expected no recipe")
        on_disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if on_disk and (config.published or not self.pre_quantized):
            raise ValueError("device_map: weights that stay on disk cannot be packed; allowed are devices and 'cpu'")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> nn.Module:
        if not self.pre_quantized and self.quantization_config.recipe is None:
            self._find_published(checkpoint_files)
        config = self.quantization_config
        if config.published:
            if not checkpoint_files:
                raise ValueError("quantization_config: a published checkpoint is read from its folder; got none")
            self._read_published(model, checkpoint_files, device_map)
            self._untie(model)
            return model
        check_states(config.layers, config.experts)
        for weight in weights_of(model, *(self._of_class(model, one) for one in (config.layers, config.experts))):
            packed = weight.empty(model)
            shell = _Awaited(packed, weight.parameter(model), getattr(packed, "bias", None))
            self.waiting.append((weight, packed, shell))
            weight.put(model, shell)
        self._untie(model)
        if config.recipe is not None:
            _refuse_codes(checkpoint_files)
            self._await_weights(model)
        return model

    def _find_published(self, files: list[str] | None) -> None:
        """Treat a checkpoint that only ModelOpt's own file describes as published. Raises ValueError for others."""
        if not files or not (Path(files[0]).parent / HF_QUANT_CONFIG).is_file():
            raise ValueError(
                "quantization_config: the checkpoint is not packed; name a recipe to pack it by, as in "
                '{"quant_method": "fp4compile", "recipe": "nvfp4"}'
            )
        self.quantization_config, self.pre_quantized = PublishedConfig(), True

    def _untie(self, model: Any) -> None:
        """Remove the packed and dequantised weights of the checkpoint from the model's ties: they are no parameters."""
        packed = {name for weight, *_ in self.waiting for name in weight.parameters}
        packed.update(*(names for names, _ in self.dequantised))
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        model.all_tied_weights_keys = {name: to for name, to in tied.items() if packed.isdisjoint((name, to))}

    def _read_published(self, model: Any, files: list[str], device_map: Any) -> None:
        """Replace weights by shells with the packed tensors of a checkpoint; transformers reads the rest."""
        folder = Path(files[0]).parent
        chosen = None if self.quantization_config.recipe is None else resolve(self.quantization_config.recipe)
        names = names_of_transformers(model)
        checkpoint = without_unused(model, read_checkpoint(folder, (CONFIG, HF_QUANT_CONFIG), files), names)
        published = read_published(checkpoint, chosen)
        with naming(folder):
            contents = in_model(model, published, names)
            weights = weights_of(model, *(self._of_class(model, one) for one in (contents.layers, contents.experts)))
            _check_known(weights, contents, names)
        tensors, base = contents.tensors, model.base_model_prefix
        self.expected = model._keys_to_ignore_on_load_unexpected
        ignored = set(self.expected or ())
        for name in contents.dequantised:
            own = f"{name}.weight"
            values = tensors.pop(own).to(_device_of(name, device_map))
            ties = getattr(model, "all_tied_weights_keys", {}).items()
            tied = {one for pair in ties if own in pair for one in pair} - tensors.keys() - {own}
            self.dequantised.append(([own, *sorted(tied)], values))
            for one in self.dequantised[-1][0]:
                module = model.get_submodule(module_name(one))
                _hide_weight(module, module._parameters.pop("weight"))
            ignored.update(_published_as(name, False, base))
        for weight in weights:
            packed = weight.empty(model)
            found = {name: tensors.pop(f"{weight.packed_names[0]}.{name}") for name in buffer_shapes(packed)}
            device = _device_of(weight.names[0], device_map)
            shell = _Shell(weight.parameter(model), getattr(packed, "bias", None))
            shell.__dict__.update({name: storable(tensor).to(device) for name, tensor in found.items()})
            self.waiting.append((weight, packed, shell))
            weight.put(model, shell)
            experts = weight.experts is not None
            ignored |= {pattern for name in weight.names for pattern in _published_as(name, experts, base)}
        model._keys_to_ignore_on_load_unexpected = ignored

    def _of_class(self, model: Any, states: dict[str, dict]) -> dict[str, dict]:
        """The descriptions of the packed weights that a model's class has; see the function `_of_class`."""
        found, strays = _of_class(model, states)
        self.strays |= strays
        return found

    def _check_strays(self, model: Any) -> None:
        """Raise ValueError if one block has a packed weight only in the file, and a parameter only in the model.

        These may be the same weights under two names (`moe.experts`, `mlp.experts`), which would be random. Parameters
        that are on the meta device, and those that the class says are not in files, do not count.
        """
        unsaid = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
        random = [
            name for name, one in model.named_parameters() if self.strays and not one.is_meta
            and not getattr(one, "_is_hf_initialized", False) and not any(p.search(name) for p in unsaid)
        ]  # fmt: skip
        for stray, block in self.strays.items():
            name = next((name for name in random if name.startswith(f"{block}.")), None)
            if name is not None:
                raise ValueError(f"the model has no {stray!r}, and the checkpoint no {name!r}, which would be random: "
                                 "the class may have another name for this part of the checkpoint")  # fmt: skip
        self.strays.clear()

    def _await_weights(self, model: Any) -> None:
        """List the weights that the recipe packs in `unread`; in `late` if they cannot be packed as they are read."""
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "distributed_config: weights that are sharded while they are loaded cannot be packed; pack the model "
                "without it, save it, and load the packed model"
            )
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        for weight, _ in decisions(model, self.quantization_config.recipe):
            if weight is None:
                continue
            # A tied weight is complete when all have been read. A weight of another dtype than the model would be cast
            # to the model's dtype before it could be packed.
            is_tied = bool({*tied, *tied.values()}.intersection(weight.parameters))
            if is_tied or weight.parameter(model).dtype != self.dtype:
                self.late.append(weight)
            else:
                self.unread.update(dict.fromkeys(weight.parameters, weight))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        self._check_strays(model)
        for weight, _, shell in self.waiting:
            if not shell.missing:
                continue
            name = f"{weight.packed_names[0]}.{min(shell.missing)}"
            if _device_of(weight.names[0], getattr(model, "hf_device_map", None)) == "disk":
                raise ValueError(
                    f"offload_buffers: packed weights, such as {name!r}, cannot stay on disk; expected False"
                )
            raise ValueError(f"tensor {name!r} is missing in the checkpoint")
        for weight, packed, shell in self.waiting:
            self._fill(model, weight, packed, shell)
        self.waiting.clear()
        for names, values in self.dequantised:
            parameter = nn.Parameter(values.to(self._kept_dtype(model, names[0])))
            for name in names:
                module = model.get_submodule(module_name(name))
                del module.weight
                module.weight = parameter
            model.all_tied_weights_keys |= dict.fromkeys(names[1:], names[0])
        self.dequantised.clear()
        if self.quantization_config.published:
            model._keys_to_ignore_on_load_unexpected = self.expected
        # The weights that the checkpoint lacks remain. transformers has initialised them, and warned.
        late = [*self.late, *dict.fromkeys(self.unread.values())]
        chosen = self._packed_by_recipe(model) if late else set()
        for weight in late:
            reason = None if weight.experts else obstacle(model.get_submodule(weight.names[0]))
            if reason is None and weight.names in chosen:
                weight.pack(model)
            elif reason is not None:
                warnings.warn(f"{weight.names[0]!r} is not packed: {reason}", stacklevel=2)
        self.unread.clear()
        self.late.clear()
        leave_fast_paths(model)
        if (
            self.quantization_config.recipe is not None and not self.quantization_config.published
        ):  # the configuration of the packed model has no recipe
            self.quantization_config.__dict__.update(vars(config_of(model)))
        attach(model)
        return model

    def _packed_by_recipe(self, model: nn.Module) -> set[tuple[str, ...]]:
        """The names of those weights left that the recipe packs, by the ties that the loaded model has."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rules that match packed layers alone
            return {weight.names for weight, _ in decisions(model, self.quantization_config.recipe) if weight}

    def _fill(self, model: nn.Module, weight: Weight, packed: PackedWeight, shell: "_Shell") -> None:
        """Assign a packed weight's tensors, and replace its shell by it."""
        buffers = {name: getattr(shell, name).view(dtype) for name, (_, dtype) in buffer_shapes(packed).items()}
        check_buffers({f"{weight.packed_names[0]}.{name}": tensor for name, tensor in buffers.items()})
        for name, tensor in buffers.items():
            setattr(packed, name, tensor)
        packed.weight_dtype = self._kept_dtype(model, min(weight.parameters)) or packed.weight_dtype
        if weight.experts is None:
            packed.bias = shell.bias
            weight.put(model, packed)
        else:
            weight.experts.module._modules[packed_name(weight.experts.child)] = packed
        packed.lay_out_scales()

    def _kept_dtype(self, model: Any, name: str) -> torch.dtype | None:
        """The dtype in which transformers keeps a parameter, if it differs from the model's; otherwise None."""
        plan = model._get_dtype_plan(self.dtype) if hasattr(model, "_get_dtype_plan") else {}
        return next((dtype for part, dtype in plan.items() if re.search(part.replace("*", ".*"), name)), None)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype to which a loaded tensor is cast; None for integers, which are codes and scales."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        return None if stored in ("U8", "I32", torch.uint8, torch.int32) else dtype

    # ------------------------------------------------------------ packing what is read

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.unread

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element, from which transformers computes device maps and the memory that it reserves."""
        if param_name not in self.unread:
            return param.element_size()
        parts = buffer_shapes(self.unread[param_name].empty(model)).values()
        return sum(prod(shape) * dtype.itemsize for shape, dtype in parts) / max(1, param.numel())

    # ------------------------------------------------------------ saving

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict]:
        """The tensors in the form of files. Also updates the configuration, which an inner model may share."""
        self.quantization_config.__dict__.update(vars(config_of(model)))
        model.config.quantization_config = self.quantization_config
        state = {name: tensor for name, tensor in model.state_dict().items() if not is_extra_state(name)}
        _spare_packed(model, [name for name in state if name.rpartition(".")[2] in BUFFERS])
        return {name: storable(tensor.detach()) for name, tensor in state.items()}, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> nn.Module:
        """The model with the dequantised values as parameters, for `model.dequantize()`."""
        if isinstance(dtype, str):  # save_pretrained leaves a name in the configuration, the default of this dtype
            dtype = getattr(torch, dtype)
        unpacked(model, requires_grad=True)
        return model if dtype in (None, model.dtype) else model.to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on the packed weights can be trained; the weights themselves are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _of_class(model: Any, states: dict[str, dict]) -> tuple[dict[str, dict], dict[str, str]]:
    """The descriptions of those packed weights that a model's class has, by the names that it has for them.

    Also the blocks that would have those which it lacks without saying so, by their names in the checkpoint. A block is
    the innermost module with a number for its name.

    A checkpoint may be of a class with a head and the model the base of it, or the other way round: names in the base
    then begin after a prefix. A base, and a class with another head, have no weights of the head, and a class may leave
    out others: it names them, has None in their place, or lacks the module that holds them, such as a decoder that is
    read without its encoder. transformers treats the tensors of the checkpoint alike, and reports those that it leaves.
    Where a class has none of the weights, none of them is left out.
    """
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}."
    has_head = bool(base) and any(name.startswith(prefix) for name in states)
    unused = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    own = {name for name, _ in (*model.named_modules(remove_duplicate=False), *model.named_parameters())}
    places = {name: {name, name.removeprefix(prefix), f"{prefix}{name}"} for name in states}
    has_any = any(names & own for names in places.values())
    is_base = has_any and bool(base) and not hasattr(model, base)
    found, strays = {}, {}
    for name, state in states.items():
        names = places[name]
        in_head = (has_head and not name.startswith(prefix)) or (is_base and "." not in name)
        left_out = in_head or any(pattern.search(name) for pattern in unused) or any(_is_none(model, n) for n in names)
        no_holder = has_any and own.isdisjoint(n.rpartition(".")[0] for n in names)
        if names & own or not (left_out or no_holder):
            found[min(names & own, default=name)] = state
        elif not left_out and (block := max(map(_blocks(own), names), key=len)):
            strays[name] = block
    return found, strays


def _blocks(own: set[str]) -> Callable[[str], str]:
    """A function from a name to the innermost module with a number for its name, of those in `own`; "" for none."""

    def block_of(name: str) -> str:
        holders = [name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1)]
        return next((one for one in holders if one.rpartition(".")[2].isdigit() and one in own), "")

    return block_of


def _is_none(module: Any, name: str) -> bool:
    """Whether a module has None in the place of a module inside it, or of one that holds that module."""
    for child in name.split("."):
        module = getattr(module, child, False)
        if module is None:
            return True
    return False


class _Shell(nn.Module):
    """The stand-in for a packed layer while weights are loaded; it has the tensors of a published checkpoint itself.

    weight: on the meta device, because code of transformers reads it. missing: the buffers that were not loaded.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.bias = bias
        _hide_weight(self, weight)
        self.out_features, self.in_features = weight.shape[-2:]  # Wav2Vec2 initialises its projections by their sizes
        self.missing: set[str] = set()

    def forward(self) -> torch.Tensor:
        """The weight on the meta device, for code of transformers that would initialise it."""
        return self.weight


def _refuse_codes(files: list[str] | None) -> None:
    """Raise ValueError for FP8 codes in a checkpoint that should have weights: transformers would drop their scales."""
    for file in files or ():
        for name, dtype in read_dtypes(Path(file)).items() if file.endswith(".safetensors") else ():
            if dtype.startswith("F8_"):
                raise ValueError(f"{file}: tensor {name!r} has codes in {dtype}, and no configuration beside it tells "
                                 "their scales; a recipe packs weights in high precision")  # fmt: skip


def _hide_weight(module: nn.Module, weight: nn.Parameter) -> None:
    """Make a weight on the meta device an attribute of a module, which transformers neither loads nor initialises."""
    module.weight = weight.detach()  # not a parameter
    module.weight._is_hf_initialized = True


class _Awaited(_Shell):
    """A shell with buffers in the form of files. transformers marks the tensors that it has loaded."""

    def __init__(self, packed: PackedWeight, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__(weight, bias)
        shapes = buffer_shapes(packed)
        self.missing.update(shapes)
        for name, (shape, _) in shapes.items():
            _, stored = dtypes_in(packed.layer_format.weight)[name]
            self.register_buffer(name, torch.empty(shape, dtype=stored, device="meta"))

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(value, "_is_hf_initialized", False) and name in self.__dict__.get("missing", ()):
            self.missing.discard(name)
        super().__setattr__(name, value)


def _check_known(weights: list[Weight], contents: Contents, names: PublishedNames) -> None:
    """Raise ValueError for a tensor of a quantised layer besides those known: transformers would skip it."""
    known: dict[str, tuple[str, ...]]
    known = {name: ("bias", *BUFFERS) for weight in weights if weight.experts is None for name in weight.names}
    known |= dict.fromkeys(contents.dequantised, ("bias", "weight"))
    for name in contents.tensors:
        layer, _, child = name.rpartition(".")
        if layer not in known and name not in names.present:  # it may have its name in the checkpoint
            layer = names.layer(layer).name
        if child not in known.get(layer, (child,)):
            raise ValueError(f"the model has no {name!r}")


def _published_as(name: str, experts: bool, base: str) -> list[str]:
    """Patterns of the names of a weight's tensors in checkpoints, where experts are in one tensor or separate.

    base: the base's name, which the checkpoint may have before the model's names, or may lack.
    """
    start = rf"^({re.escape(base)}\.)?"
    name = name.removeprefix(f"{base}.")
    if not experts:
        return [rf"{start}{re.escape(name)}\.(?!bias$)"]
    module = re.escape(name.rpartition(".")[0]).replace(r"\.experts", r"(\.moe)?\.experts")
    return [rf"{start}{re.escape(name)}(_|$)", rf"{start}{module}\.\d+\."]


def _device_of(name: str, device_map: Any) -> Any:
    """The device of a module by a device map: that of the longest name in the map that contains the module."""
    holders = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
    placed = device_map if isinstance(device_map, dict) else {}
    return next((placed[holder] for holder in holders if holder in placed), placed.get("", "cpu"))


class _Pack(ConversionOps):
    """The operation on tensors that transformers has read: pack them into the model, and return the others."""

    def __init__(self, quantizer: Fp4CompileQuantizer):
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        model, missing_keys = kwargs["model"], kwargs["missing_keys"]
        left = {}
        for name in list(input_dict):
            value = input_dict.pop(name)  # removes the dictionary's reference
            value = value[0] if isinstance(value, list) else value
            weight = self.quantizer.unread.get(name)
            if weight is None:
                left[name] = value
            elif value.shape != weight.parameter(model).shape:  # transformers raises, or initialises another one
                self._forget(weight)
                self.quantizer.late.append(weight)
                left[name] = value
            else:
                self._forget(weight)
                module, child = weight.slot(model)
                module._parameters[child] = nn.Parameter(value, requires_grad=False)
                del value
                weight.pack(model)
                missing_keys.difference_update(weight.parameters)
                _mark_initialised(model, weight, missing_keys)
        return left

    def _forget(self, weight: Weight) -> None:
        for name in weight.parameters:
            self.quantizer.unread.pop(name)


class _Sparing(WeightConverter):
    """A conversion of a model's weights which some layers of the checkpoint are spared: they have packed tensors.

    spared: the names that the conversion would give to these layers.
    """

    __slots__ = ("spared",)
    spared: set[str]

    def reverse_transform(self) -> WeightTransform:
        made: Any = super().reverse_transform()
        made.spared = self.spared
        return made

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        renamed, pattern = super().rename_source_key(source_key)
        return (source_key, None) if renamed.rpartition(".")[0] in self.spared else (renamed, pattern)


def _spare_packed(model: Any, names: list[str]) -> None:
    """Let `save_pretrained` write packed tensors by the model's own names, instead of converting them like weights.

    For some classes it concatenates the weights of q, k and v into one (NomicBert's `Wqkv`), by patterns that packed
    tensors match, too. But q, k and v have a global scale each, may have other formats, or may not be packed, so that
    their packed tensors are not the packed tensors of one layer. from_pretrained converts no tensor that has the
    model's name.
    """
    found = getattr(model, "_weight_conversions", None)
    if found is None:  # as transformers does for a model that was not loaded
        found = without_prefixes(get_model_conversion_mapping(model, add_legacy=False))
    reverse: list[Any] = [one.reverse_transform() for one in reversed(found) if isinstance(one, WeightConverter)]
    matched = [converted for name in names if (converted := _converted(name, reverse))]
    if not matched:
        return
    model._weight_conversions = kept = []
    for one in found:
        if isinstance(one, WeightConverter):
            sparing = _Sparing.__new__(_Sparing)
            state: Any = one.__getstate__()  # whose fields differ between versions of transformers
            for field, value in state[1].items():
                object.__setattr__(sparing, field, value)
            sparing.spared = {name.rpartition(".")[0] for name in matched} | getattr(one, "spared", set())
            one = sparing
        kept.append(one)


def _converted(name: str, converters: Iterable[Any]) -> str | None:
    """The name that the first conversion whose patterns match a tensor's name gives the tensor; None if none does."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed
    return None


def _mark_initialised(model: nn.Module, weight: Weight, missing: set[str]) -> None:
    """Mark a packed weight's module as initialised: otherwise transformers would read the weight to initialise it."""
    module, _ = weight.slot(model)
    path = weight.names[0].rpartition(".")[0] if weight.experts else weight.names[0]
    if missing.isdisjoint(f"{path}.{name}" for name in module._parameters):
        module._is_hf_initialized = True


# ---------------------------------------------------------------- configurations


def config_of(model: nn.Module) -> Fp4CompileConfig:
    """The quantization_config of a packed model."""
    return Fp4CompileConfig(*states_of(packed_modules(model)))


def attach(model: nn.Module) -> None:
    """Make `save_pretrained` of every transformers model in a module save its packed form.

    The outermost ones get copies of their configurations, which unpacked models may share. Packed heads are tied to
    embeddings no more.
    """
    inside: set[nn.Module] = set()
    for one in model.modules():
        config = config_of(one) if isinstance(one, PreTrainedModel) else Fp4CompileConfig()
        if not (config.layers or config.experts):
            continue
        if one not in inside:
            if not isinstance(getattr(one, "hf_quantizer", None), Fp4CompileQuantizer):
                _own_config(model, one.config)
            one.config.quantization_config = config
            inside.update(one.modules())
        ties = one._tied_weights_keys
        if isinstance(ties, dict) and any(module_name(name) in config.layers for name in ties):
            # `tie_weights` would assign the weight of a packed head. A class may compute its ties (Deimv2).
            one._tied_weights_keys = {name: to for name, to in ties.items() if module_name(name) not in config.layers}
        one.hf_quantizer = Fp4CompileQuantizer(config, pre_quantized=True)


def _own_config(model: nn.Module, config: PreTrainedConfig) -> None:
    """Replace a configuration, and those inside it, by a copy in all modules of a model."""
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copies.get(id(value), value)


def register() -> None:
    """Make `from_pretrained` use this quantiser. `fp4compile_autoload` calls it as soon as a checkpoint needs it."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Fp4CompileConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = Fp4CompileQuantizer
