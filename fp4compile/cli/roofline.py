"""`python -m fp4compile roofline --gpu B200`: a recipe's predicted gain on a GPU that need not be present."""

import argparse
import json
from typing import Any

from fp4compile import hardware
from fp4compile.cli.roofline_shapes import MODELS, LayerShape, shapes
from fp4compile.cli.roofline_times import measured
from fp4compile.hardware import GPUS, Gpu
from fp4compile.recipe import DEFAULT, Recipe, recipes, resolve
from fp4compile.roofline import model as roofline

_HEADER = {"layer": "layer", "m": "M", "n": "N", "k": "K", "experts": "experts", "rows_each": "M/experts",
           "bf16_us": "bf16, us", "recipe_us": "recipe, us", "gain": "gain", "binds": "bound by",
           "measured_bf16_us": "measured bf16, us", "measured_recipe_us": "measured recipe, us",
           "measured_gain": "measured gain"}  # fmt: skip


def add_command(commands: Any) -> None:
    """Add `roofline` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("roofline", help="predict times of linear layers, by GPU and recipe")
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)}; by default the one that is there")
    parser.add_argument("--recipe", default=DEFAULT, help=f"one of {', '.join(recipes())}, or a .toml file")
    parser.add_argument("--shapes", default="pow2", help=f"pow2, {', '.join(MODELS)}, or one M,N,K")
    parser.add_argument("--train", action="store_true", help="forward and backward; otherwise forward alone")
    parser.add_argument("--measure", action="store_true", help="measure too, on the GPU that is there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table. Raises ArgumentTypeError for arguments that cannot be used."""
    try:
        gpu, recipe, wanted = _gpu(args.gpu), resolve(args.recipe), shapes(args.shapes, args.train)
    except (ValueError, TypeError, OSError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if args.measure and gpu != hardware.present():
        there = hardware.present()
        raise argparse.ArgumentTypeError(
            "--measure: there is no GPU of the list to measure on" if there is None
            else f"--measure: the GPU that is there is {there.name}, and --gpu is {gpu.name}"
        )  # fmt: skip
    rows = [_row(shape, recipe, gpu, args.train) for shape in wanted]
    if args.measure:
        rows = [row | measured(recipe, shape, args.train) for row, shape in zip(rows, wanted, strict=True)]
    content: dict[str, Any] = {
        "gpu": gpu.name, "recipe": recipe.name, "products": "fprop, dgrad, wgrad" if args.train else "fprop",
        "source": gpu.source, "share_source": gpu.share_source, "rows": rows,
    }  # fmt: skip
    print(json.dumps(content, indent=1) if args.json else _text(content, gpu, args.measure))


def _gpu(name: str | None) -> Gpu:
    if name is not None:
        return hardware.named(name)
    there = hardware.present()
    if there is None:
        raise ValueError(f"--gpu: the GPU of a prediction is needed, one of {', '.join(GPUS)}")
    return there


def _row(shape: LayerShape, recipe: Recipe, gpu: Gpu, train: bool) -> dict[str, Any]:
    found = roofline.predict(recipe, gpu, *shape.sizes, train=train, experts=shape.experts)
    return {
        "layer": shape.layer, "m": shape.m, "n": shape.n, "k": shape.k, "experts": shape.experts,
        "rows_each": shape.rows_each, "bf16_us": 1e6 * found.plain_seconds, "recipe_us": 1e6 * found.seconds,
        "gain": found.gain, "binds": found.binds,
    }  # fmt: skip


def _text(content: dict[str, Any], gpu: Gpu, measure: bool) -> str:
    rows = content["rows"]
    keys = [key for key in rows[0] if key not in ("layer", "experts", "rows_each") or any(row[key] for row in rows)]
    cells = [[_HEADER[key] for key in keys], *([_cell(key, row[key]) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    kind = "predicted and measured" if measure else "predicted, not measured"
    lines = [f"{content['recipe']} on {gpu.name}, {content['products']}: {kind}"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines += [f"rates: {gpu.source}", f"shares of these that are reached: {gpu.share_source}"]
    return "\n".join(lines)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "rows_each":
        return f"{value:.4g}"
    if isinstance(value, float):
        return f"{value:.2f}" if key.endswith("gain") else f"{value:.1f}"
    return str(value)
