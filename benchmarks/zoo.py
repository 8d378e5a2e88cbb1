"""What the recipes do to a small model of each of many families, with random weights, on a CPU.

    python -m benchmarks.zoo [--families Llama T5 ...] [--inductor] [--out FILE]

Each family of `benchmarks.architectures` has a process of its own, so that a crash costs one family, and the file is
written after each. A second run with the same --out runs what the file has not, and what failed. Captured graphs run as
they are, which takes a quarter of an hour of one core; --inductor compiles them, in half an hour. Exits with 1 where a
part of a family failed.

A model is in bf16 and compared with the same weights in float32, uncompiled. A family has four parts:

inference: compiled under `nvfp4`. share: of the FLOPs of matrix products. left alone: the other shares, by reason.
    SQNR: of the outputs. "packed SQNR" has the packed model, run eagerly, in the place of the float32 one: two ways to
    the same quantised model, None where they are equal. With --inductor they differ by roundings in bf16, and by what
    these move to other codes. Experts, whose activations are not quantised eagerly, make them differ as well.
training: one step under `nvfp4_train`, in training mode without dropout, to a random target. cosine: of all gradients
    together. "bf16 cosine" is that of the uncompiled model in bf16. without gradient: parameters that have one in
    float32 and none here.
generation: greedy, through the key-value cache, compiled under `nvfp4_weight_only` in float32, of models that
    generate. equal: how many tokens are those of the packed model, run eagerly; None where nothing is packed.
packing: `pack_` under `nvfp4`, saved, loaded into a fresh model. layers: how many weights are packed. left: how many
    are not, by reason. equal: whether all outputs have the same bits.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp4compile
from benchmarks import common
from benchmarks.architectures import ARCHITECTURES, Architecture, Batch
from fp4compile.report.decibels import decibels
from tests.helpers import without_codegen

NEW_TOKENS = 8
TIMEOUT = 900  # seconds of one family
# Inductor's C++ is compiled in this process, and without vector code: that takes half of the time.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0", "OMP_NUM_THREADS": "1"}


# ---------------------------------------------------------------- models and what they give


def made(family: Architecture, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The family's small model, with the values of bf16 in whatever dtype."""
    torch.manual_seed(0)
    return family.made(**family.small).bfloat16().to(dtype).eval()


def packed_of(family: Architecture, recipe: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, int]:
    """(the small model, packed; how many weights that are)."""
    model = made(family, dtype)
    return model, len(fp4compile.pack_(model, recipe).quantised)


def batch_of(family: Architecture, dtype: torch.dtype = torch.bfloat16) -> Batch:
    torch.manual_seed(1)
    return {name: value.bfloat16().to(dtype) if value.is_floating_point() else value
            for name, value in family.batch().items()}  # fmt: skip


def outputs(result: Any) -> Iterator[torch.Tensor]:
    """The tensors that a model returns, but those that it keeps for its next call."""
    if isinstance(result, torch.Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(result, dict):
        for name, value in result.items():
            if "past_key_values" not in name and "cache" not in name:
                yield from outputs(value)
    elif isinstance(result, tuple | list):
        for value in result:
            yield from outputs(value)


def joined(tensors: Any) -> torch.Tensor:
    """All elements of all tensors, in one vector."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def called(model: Callable, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return joined(outputs(model(**batch)))


def sqnr(exact: torch.Tensor, other: torch.Tensor) -> float | None:
    """None where both are equal."""
    found = decibels(exact.square().sum().item(), (exact - other).square().sum().item())
    return round(found, 1) if found < math.inf else None


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return round(torch.cosine_similarity(a, b, 0).item(), 4)


def counted(backend: Any) -> dict[str, Any]:
    """What a backend's report says."""
    report = backend.report
    left = {reason: round(flops, 4) for reason, (flops, _) in report.reason_shares().items() if flops}
    return {"share": round(report.flops_share() or 0.0, 4), "left alone": left, "graphs": report.graphs,
            "products": len(report.rows), "quantised": len(report.quantised)}  # fmt: skip


# ---------------------------------------------------------------- the parts


def inference(family: Architecture) -> dict[str, Any]:
    exact = called(made(family, torch.float32), batch_of(family, torch.float32))
    batch, model = batch_of(family), made(family)
    plain = called(model, batch)
    backend = fp4compile.backend("nvfp4")
    found = called(torch.compile(model, backend=backend), batch)
    packed, layers = packed_of(family, "nvfp4")
    beside = {"packed SQNR": sqnr(called(packed, batch), found)} if layers else {}
    return counted(backend) | beside | {
        "SQNR": sqnr(exact, found), "bf16 SQNR": sqnr(exact, plain), "cosine": cosine(exact, found),
    }  # fmt: skip


def training(family: Architecture) -> dict[str, Any]:
    exact = stepped(made(family, torch.float32), batch_of(family, torch.float32))
    batch = batch_of(family)
    plain = stepped(made(family), batch)
    backend = fp4compile.backend("nvfp4_train")
    found = stepped(made(family), batch, lambda model: torch.compile(model, backend=backend))
    missing = sorted(exact[1].keys() - found[1].keys())
    if missing:
        return counted(backend) | {"without gradient": missing}
    names = list(exact[1])
    together = [joined(gradients[name] for name in names) for _, gradients in (exact, plain, found)]
    return counted(backend) | {
        "loss": found[0], "exact loss": exact[0], "cosine": cosine(together[0], together[2]),
        "bf16 cosine": cosine(together[0], together[1]), "parameters": len(names), "without gradient": [],
    }  # fmt: skip


def stepped(model: nn.Module, batch: Batch, compile: Callable = lambda model: model) -> tuple[float, dict]:
    """(the loss, the gradients by parameter) of one step to a random target."""
    without_dropout(model.train())
    torch.manual_seed(2)
    result = list(outputs(compile(model)(**batch)))
    generator = torch.Generator().manual_seed(3)
    targets = [torch.randn(value.shape, generator=generator) for value in result]
    pairs = zip(result, targets, strict=True)
    loss = torch.stack([nn.functional.mse_loss(value.float(), target) for value, target in pairs]).sum()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    if not all(torch.isfinite(value).all() for value in (loss, *gradients.values())):
        raise ValueError("the loss or a gradient is not finite")
    return round(loss.item(), 4), gradients


def without_dropout(model: nn.Module) -> None:
    """Its masks would be others in each of the models that are compared."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)


def generation(family: Architecture) -> dict[str, Any] | None:
    if not family.generates:
        return None
    batch = batch_of(family, torch.float32)
    batch.pop("decoder_input_ids", None)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    packed, layers = packed_of(family, "nvfp4_weight_only", torch.float32)
    expected = packed.generate(**batch, **options)
    model, backend = made(family, torch.float32), fp4compile.backend("nvfp4_weight_only")
    for part in (model, *encoders(model)):
        part.forward = torch.compile(part.forward, backend=backend, dynamic=True)
    found = model.generate(**batch, **options)
    new = expected[:, -NEW_TOKENS:]
    equal = int((found[:, -NEW_TOKENS:] == new).sum()) if layers else None
    return counted(backend) | {"tokens": new.numel(), "equal": equal}


def encoders(model: nn.Module) -> Iterator[nn.Module]:
    """What `generate` of transformers calls by itself, outside of the model's forward."""
    names = ("encoder", "model.encoder", "model.vision_tower", "model.multi_modal_projector")
    return (part for name, part in model.named_modules() if name in names)


def packing(family: Architecture) -> dict[str, Any]:
    batch, model, fresh = batch_of(family), made(family), made(family)
    report = fp4compile.pack_(model, "nvfp4")
    told = {"layers": len(report.quantised), "left": report.reasons()}
    if not report.quantised:
        return told
    with tempfile.TemporaryDirectory() as folder:
        fp4compile.save_packed(model, Path(folder) / "model.safetensors")
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        fp4compile.load_packed(fresh, Path(folder) / "model.safetensors")
    return told | {"equal": torch.equal(called(model, batch), called(fresh, batch))}


PARTS = {"inference": inference, "training": training, "generation": generation, "packing": packing}


def record_of(name: str, inductor: bool = False) -> dict[str, Any]:
    """A family's row: each part, or {"error": ...} for one that failed. inductor: whether it generates code."""
    with pytest.MonkeyPatch.context() as patch:
        if not inductor:
            without_codegen.install(patch)
        return _record_of(name)


def _record_of(name: str) -> dict[str, Any]:
    family = ARCHITECTURES[name]
    if (missing := family.missing()) is not None:
        return {"family": name, "skipped": f"{missing} is not installed"}
    parts: dict[str, Any] = {}
    seconds = {}
    for part, measure in PARTS.items():
        torch._dynamo.reset()
        start = time.process_time()
        try:
            parts[part] = measure(family)
        except Exception as error:  # noqa: BLE001 (whatever a model or a compilation raises: the other parts run)
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            parts[part] = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        seconds[part] = round(time.process_time() - start, 1)
    package = family.package.partition(".")[0]
    return {"family": name, "package": f"{package} {version(package)}", "class": family.model,
            "weights": sum(each.numel() for each in made(family).parameters()), **parts,
            "seconds": seconds}  # fmt: skip


def failed(record: dict[str, Any]) -> bool:
    parts = [record.get(part) or {} for part in PARTS]
    return "error" in record or any("error" in part or part.get("without gradient") for part in parts)


# ---------------------------------------------------------------- processes


def in_a_process(name: str, inductor: bool) -> dict[str, Any]:
    found = apart("zoo", name, inductor, TIMEOUT)
    return {"family": name, "error": found} if isinstance(found, str) else found


def apart(module: str, name: str, inductor: bool, timeout: float) -> dict[str, Any] | str:
    """What `record_of` of a module of benchmarks returns in a process of its own, or how that failed."""
    code = f"import json; from benchmarks import {module} as m; print(json.dumps(m.record_of({name!r}, {inductor})))"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], cwd=Path(__file__).parents[1], timeout=timeout,
            env={**ENVIRONMENT, **os.environ}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout} seconds"
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else f"ended with status {done.returncode}"


def stored(path: Path | None) -> dict[str, dict[str, Any]]:
    """The rows of a file that need not run again, by family."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row["family"]: row for row in rows if not failed(row) and "skipped" not in row}


def shown(record: dict[str, Any]) -> dict[str, Any]:
    """A row of the table that is printed."""
    parts = {part: record.get(part) or {} for part in PARTS}
    errors = [f"{part}: {found['error']}" for part, found in {**parts, "": record}.items() if "error" in found]
    return {
        "family": record["family"], "share": parts["inference"].get("share"), "SQNR": parts["inference"].get("SQNR"),
        "packed SQNR": parts["inference"].get("packed SQNR"), "training share": parts["training"].get("share"),
        "cosine": parts["training"].get("cosine"), "generated": parts["generation"].get("equal"),
        "packed": parts["packing"].get("equal"), "seconds": record.get("seconds"),
        "failed": "; ".join(errors) or record.get("skipped"),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="FAMILY")
    parser.add_argument("--inductor", action="store_true", help="generate code")
    parser.set_defaults(device="cpu")
    args = parser.parse_args(arguments)
    rows = stored(args.out)
    for name in args.families:
        if name not in rows:
            rows[name] = in_a_process(name, args.inductor)
            print(common.table([shown(rows[name])]).splitlines()[-1], file=sys.stderr, flush=True)
            write(rows, args)
    print(common.table([shown(row) for row in rows.values()]))
    return int(any(map(failed, rows.values())))


def write(rows: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    ordered = [rows[name] for name in ARCHITECTURES if name in rows]
    common.write(args, {"new tokens": NEW_TOKENS, "inductor": args.inductor}, {"rows": ordered})


if __name__ == "__main__":
    sys.exit(main())
