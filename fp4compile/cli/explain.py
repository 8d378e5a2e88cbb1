"""`python -m fp4compile explain CONFIG`: what a recipe would do to a model, from its configuration alone."""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from fp4compile import hardware
from fp4compile.cli import arguments
from fp4compile.cli.explain_models import model_of
from fp4compile.hardware import GPUS, Gpu
from fp4compile.report.explain import explain

_GPU = "B200"  # where no GPU of the list is there


def add_command(commands: Any) -> None:
    """Add `explain` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("explain", help="report what a recipe would do to a model")
    parser.add_argument(
        "model", metavar="CONFIG", help="a config.json of transformers, its folder, or package.module:function, which "
        "returns a model, or a model and its arguments"
    )  # fmt: skip
    parser.add_argument("--recipe", help="a named recipe, or a .toml or .json file (FP4COMPILE_RECIPE, or nvfp4)")
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)} (the one that is there, or {_GPU})")
    parser.add_argument("--tokens", type=arguments.positive, default=4096, help="length of the sequence (4096)")
    parser.add_argument("--train", action="store_true", help="a training step, without the loss and the optimiser")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the report on a model on the meta device. Raises ArgumentTypeError for arguments that cannot be used."""
    recipe, gpu = arguments.recipe(args.recipe), _gpu(args.gpu)
    model, positional, named = model_of(args.model, args.tokens)
    if args.train and isinstance(model, torch.nn.Module):
        model.train()
    printed = io.StringIO()
    with torch.set_grad_enabled(args.train), contextlib.redirect_stdout(printed):
        report = explain(model, *positional, recipe=recipe, gpu=gpu, **named)
    print(json.dumps(report.to_dict(), indent=1) if args.json else report)
    if args.html is not None:
        args.html.write_text(report.to_html(), encoding="utf-8")


def _gpu(name: str | None) -> Gpu:
    try:
        return (hardware.present() or hardware.named(_GPU)) if name is None else hardware.named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"--gpu: {error}") from error
