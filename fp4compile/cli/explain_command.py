"""`python -m fp4compile explain CONFIG`: a recipe's report on a model, from its configuration alone."""

import argparse
import contextlib
import gc
import importlib
import inspect
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fp4compile import hardware
from fp4compile.cli import arguments
from fp4compile.hardware import GPUS, Gpu
from fp4compile.roofline.explain import explain
from fp4compile.weights.published.conventions import CONFIG, HF_QUANT_CONFIG, declared_formats
from fp4compile.weights.published.shards import read_json

_GPU = "B200"  # if the local GPU is not in the list
# A model, and the positional and named arguments of its call.
ModelCall = tuple[Callable, tuple, dict[str, Any]]


def add_command(commands: Any) -> None:
    """Add `explain` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("explain", help="report what a recipe would do to a model")
    parser.add_argument(
        "model", metavar="CONFIG", help="a config.json of transformers, its folder, or package.module:function, which "
        "returns a model, or a model and its arguments"
    )  # fmt: skip
    parser.add_argument("--recipe", help="a named recipe, or a .toml or .json file (FP4COMPILE_RECIPE, or nvfp4)")
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)} (the local GPU, or {_GPU})")
    parser.add_argument("--tokens", type=arguments.positive, default=4096, help="length of the sequence (4096)")
    parser.add_argument("--train", action="store_true", help="a training step, without the loss and the optimiser")
    parser.add_argument("--all", action="store_true", help="a line for each matmul, with what is launched for it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=arguments.new_file, metavar="FILE", help="write an HTML page, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the report on a model on the meta device. Raises ArgumentTypeError for arguments that cannot be used."""
    recipe, gpu = arguments.recipe(args.recipe), _gpu(args.gpu)
    with _uncollected():
        model, positional, named = model_of(args.model, args.tokens)
        if args.train and isinstance(model, torch.nn.Module):
            model.train()
        with torch.set_grad_enabled(args.train), contextlib.redirect_stdout(io.StringIO()):
            report = explain(model, *positional, recipe=recipe, gpu=gpu, **named)
    formats = _formats_of(Path(args.model))
    if args.json:
        print(json.dumps(report.to_dict() | ({"checkpoint": formats} if formats else {}), indent=1))
    else:
        print("\n".join([*(f"checkpoint  {text}" for text in formats), report.table(all=args.all)]))
    if args.html is not None:
        args.html.write_text(report.to_html(all=args.all), encoding="utf-8")


def _formats_of(path: Path) -> list[str]:
    """In which formats the checkpoint of a configuration is; none where it is not quantised, or there is no file."""
    folder = path if path.is_dir() else path.parent
    files = {file: folder / file for file in (CONFIG, HF_QUANT_CONFIG)}
    if path.is_file():
        files[CONFIG] = path
    return declared_formats(folder, {name: read_json(file) for name, file in files.items() if file.is_file()})


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A context without Python's garbage collector, which takes a fifth of the time of tracing a large model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _gpu(name: str | None) -> Gpu:
    try:
        return (hardware.present() or hardware.named(_GPU)) if name is None else hardware.named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"--gpu: {error}") from error


# ---------------------------------------------------------------- models on the meta device


def model_of(source: str, tokens: int) -> ModelCall:
    """The model of a path of a configuration or of `package.module:function`.

    tokens: the length of the sequence, for models that take tokens.

    Raises ArgumentTypeError if there is no such file or function, and for a model with unknown arguments.
    """
    module, colon, function = source.partition(":")
    if colon and not Path(source).exists():
        return _of_function(source, module, function, tokens)
    return _of_config(Path(source), tokens)


def _of_function(source: str, module: str, name: str, tokens: int) -> ModelCall:
    """The model that a function returns, or the model and its arguments: a dict, a tuple, or a single one."""
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{source!r}: {error}") from error
    if isinstance(function, torch.nn.Module) or not callable(function):
        raise argparse.ArgumentTypeError(f"{source!r}: expected a function that returns a model, got an object of "
                                         f"{type(function).__name__}")  # fmt: skip
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{source!r}: expected a function without arguments: {error}") from error
    with torch.device("meta"):
        made = function()
        given = made[1] if isinstance(made, tuple) and len(made) == 2 else torch.zeros(1, tokens, dtype=torch.long)
    model = made[0] if isinstance(made, tuple) else made
    if not callable(model):
        raise argparse.ArgumentTypeError(f"{source!r}: expected a model, got {type(model).__name__}")
    if isinstance(given, dict):
        return model, (), given
    return model, given if isinstance(given, tuple) else (given,), {}


def _of_config(path: Path, tokens: int) -> ModelCall:
    """The model of a configuration of transformers, in bf16."""
    try:
        import transformers
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"{str(path)!r}: a configuration needs the package transformers") from error
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    with torch.device("meta"):
        model = _class_of(transformers, config)(config).eval().bfloat16()
        compares = type(config) in transformers.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING
        return model, (), _arguments(model, config, tokens, "texts and images" if compares else None)


def _class_of(transformers: Any, config: Any) -> Callable[[Any], torch.nn.Module]:
    """The model's constructor: the first architecture of the configuration, else a decoder or the base model."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    decoder = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    return (transformers.AutoModelForCausalLM if decoder else transformers.AutoModel).from_config


def _arguments(model: Any, config: Any, tokens: int, others: str | None) -> dict[str, torch.Tensor]:
    """Arguments for one call: tokens, or one image. others: what the model takes if it is neither of these alone."""
    if others is None and model.main_input_name == "input_ids":
        sequence = torch.zeros(1, tokens, dtype=torch.long)
        names = ("input_ids", *(("decoder_input_ids",) if config.is_encoder_decoder else ()))
        return dict.fromkeys(names, sequence)
    size = getattr(config, "image_size", None)
    if others is None and model.main_input_name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width, dtype=torch.bfloat16)}
    needs = others or repr(model.main_input_name)
    raise argparse.ArgumentTypeError(
        f"{type(model).__name__} takes {needs}, whose size is unknown here: give a function "
        "(package.module:function) that returns the model and its arguments"
    )
