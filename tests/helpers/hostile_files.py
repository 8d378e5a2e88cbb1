"""Checkpoints that are broken in one place each, made of whole ones: our own files, and three published layouts.

`KINDS` are the whole ones, `variants()` the broken ones. What a variant's error has to name stands with it.
"""

import functools
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fp4compile
from tests.helpers.packed_models import STATIC, Net

FILE = "model.safetensors"
CONFIG, HF_QUANT_CONFIG, INDEX = "config.json", "hf_quant_config.json", "model.safetensors.index.json"
LAYER = "layers.1"


class Down(nn.Module):
    """Experts as [experts, in, out], under the name that gpt-oss has for them."""

    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(2, 64, 48))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.norm = Down(), nn.Linear(8, 8)


# ---------------------------------------------------------------- whole checkpoints


def write_packed(folder: Path) -> None:
    model = Net()
    fp4compile.pack_(model, fp4compile.Recipe.from_dict({"recipe": "nvfp4_static", "static_scales": STATIC}))
    fp4compile.save_packed(model, folder / FILE)


def write_packed_experts(folder: Path) -> None:
    model = Experts()
    recipe = fp4compile.Recipe(fprop_x="mxfp8", fprop_w="mxfp4", rules=[("norm", "skip")])
    fp4compile.pack_(model, recipe, contracted={"*": -2})
    fp4compile.save_packed(model, folder / FILE)


def exporter(layout: str, recipe: str, **options) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        model, scales = Net(), {"static_scales": STATIC} if recipe == "nvfp4_static" else {}
        fp4compile.pack_(model, fp4compile.Recipe.from_dict({"recipe": recipe, **scales}))
        fp4compile.export_packed(model, folder, layout, **options)

    return write


def write_gpt_oss(folder: Path) -> None:
    tensors = {f"norm.{name}": tensor for name, tensor in Experts().norm.state_dict().items()}
    tensors["experts.down_proj_blocks"] = torch.randint(256, (2, 48, 2, 16), dtype=torch.uint8)
    tensors["experts.down_proj_scales"] = torch.randint(118, 125, (2, 48, 2), dtype=torch.uint8)
    save_file(tensors, folder / FILE)


# name -> (writes a whole checkpoint into a folder, makes the model that it is of)
KINDS: dict[str, tuple[Callable[[Path], object], Callable[[], nn.Module]]] = {
    "packed": (write_packed, Net),
    "packed_experts": (write_packed_experts, Experts),
    "modelopt": (exporter("modelopt", "nvfp4_static"), Net),
    "sharded": (exporter("modelopt", "nvfp4_static", max_shard_size=9000), Net),
    "compressed": (exporter("compressed-tensors", "nvfp4_static"), Net),
    "gpt_oss": (write_gpt_oss, Experts),
}


# ---------------------------------------------------------------- what is done to them


@dataclass(frozen=True)
class Variant:
    """A broken checkpoint. spoil: changes a folder that holds a whole one. named: what the error's message holds."""

    kind: str
    what: str
    spoil: Callable[[Path], object]
    named: str = FILE


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A change of the bytes of the safetensors file."""
    return lambda folder: (folder / FILE).write_bytes(change((folder / FILE).read_bytes()))


def header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A change of the header of the safetensors file: to it, or by what the function returns."""

    def spoil(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        head = json.loads(content[8 : 8 + length])
        result = change(head)
        new = result if isinstance(result, bytes) else json.dumps(head).encode()
        return struct.pack("<Q", len(new)) + new + content[8 + length :]

    return raw(spoil)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        with safe_open(folder / FILE, "pt") as file:
            found, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        change(found)
        save_file(found, folder / FILE, metadata)

    return spoil


def each(names: Iterable[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    """The same change of tensors."""
    return tensors(lambda found: found.update({name: change(found[name]).contiguous().clone() for name in names}))


def lost(name: str) -> Callable[[Path], object]:
    return tensors(lambda found: found.pop(name))


def filled(name: str, value: float) -> Callable[[Path], object]:
    return each([name], lambda tensor: tensor.fill_(value))


def with_byte(name: str, value: int) -> Callable[[Path], object]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).view(-1)[3] = value
        return tensor

    return each([name], change)


def put(content: object, path: tuple, value: object) -> None:
    for key in path[:-1]:
        content = content[key]
    if value is GONE:
        del content[path[-1]]
    else:
        content[path[-1]] = value


GONE = "(gone)"  # in the place of a value: the key goes
DEEP = functools.reduce(lambda inner, _: [inner], range(900), [])  # `json` reads so many lists, and `repr` may fail


def in_header(*path: object, value: object) -> Callable[[Path], object]:
    return header(lambda head: put(head, path, value))


def in_json(file: str, *path: object, value: object) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        put(content, path, value)
        (folder / file).write_text(json.dumps(content))

    return spoil


def in_metadata(*path: object, value: object) -> Callable[[Path], object]:
    """A change of what `save_packed` writes to the metadata."""

    def change(head: dict) -> None:
        content = json.loads(head["__metadata__"]["fp4compile"])
        put(content, path, value)
        head["__metadata__"]["fp4compile"] = json.dumps(content)

    return header(change)


def text(file: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


# What stands where a JSON object is expected.
NO_OBJECTS: dict[str, str | bytes] = {
    "empty": "", "cut": '{"a": ', "list": "[]", "null": "null", "number": "5", "string": '"x"',
    "no UTF-8": b'{"\xff": 1}', "no JSON": "quantised: yes",
    "deep": "[" * 100_000, "deep objects": '{"a":' * 100_000, "zeros": "\0" * 64,
    "digits": f'{{"a": {"9" * 5000}}}',
}  # fmt: skip


# ---------------------------------------------------------------- safetensors files


def broken_bytes() -> Iterator[Variant]:
    """safetensors itself tells that they are broken."""
    for part in (0, 7, 9, 0.5, -1):
        cut = functools.partial(lambda n, b: b[: int(n * len(b)) if isinstance(n, float) else n], part)
        yield Variant("packed", f"cut at {part}", raw(cut))
    for length in (0, 2**31, 2**64 - 1):
        longer = functools.partial(lambda n, b: struct.pack("<Q", n) + b[8:], length)
        yield Variant("packed", f"header of {length} bytes", raw(longer))
    yield Variant("packed", "one byte more", raw(lambda b: b + b"\0"))


def broken_headers() -> Iterator[Variant]:
    whole: dict[str, bytes] = {"no UTF-8": b'{"\xff": 1}', "deep": b"[" * 50_000, "list": b"[]", "number": b"5"}
    for what, content in whole.items():
        yield Variant("packed", f"header: {what}", header(lambda _, content=content: content))
    entries: dict[str, list] = {
        "dtype": ["F5", GONE, 5, "F6_E2M3"],  # torch has no values of the last
        "shape": [[-64, -4], [2**40, 2**40], 256, None, [2**70], DEEP],
        "data_offsets": [[256, 0], [2**40, 2**40 + 256], [-256, 0], [0]],
    }
    for key, values in entries.items():
        for value in values:
            spoil = in_header(f"{LAYER}.weight_scales", key, value=value)
            yield Variant("packed", f"{key} of a tensor: {short(value)}", spoil)
    nothing = {"dtype": "U8", "shape": [2**63, 0], "data_offsets": [0, 0]}
    yield Variant("packed", "nothing, of a huge shape", in_header("nothing", value=nothing))
    for value in (5, [], "x", {"fp4compile": 5}):
        yield Variant("packed", f"metadata {value}", in_header("__metadata__", value=value))


# ---------------------------------------------------------------- our own files


def broken_metadata() -> Iterator[Variant]:
    for what, content in NO_OBJECTS.items():
        if isinstance(content, str):
            yield Variant(
                "packed", f"metadata: {what}", in_header("__metadata__", "fp4compile", value=content), "metadata"
            )
    of_layer: dict[str, list] = {
        "more": [5], "weight": [5, None, [], "nvfp5", "", DEEP, "e2m1:1x16:e9m9:tensor:te", GONE],
        "activation": [5, [], {}, "mxfp8", "x", None, "nvfp4_rowwise", GONE],
        "in_features": ["64", None, True, 64.0, -64, 10**30, [64]], "out_features": [65, None, DEEP],
        "activation_outer": [
            -1, 0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-39, 1e300, 10**400, "x", "0.1", True,
            [0.1], {}, DEEP,
        ],
    }  # fmt: skip
    yield from of_values("packed", "metadata", in_metadata, ("layers",), [[], None, 5, "x", GONE, DEEP])
    yield from of_values("packed", LAYER, in_metadata, ("layers", LAYER), [[], None, {}, "x", DEEP])
    for key, values in of_layer.items():
        yield from of_values("packed", LAYER, in_metadata, ("layers", LAYER, key), values)
    for key, value, why in (
        ("weight", "nvfp6", "unknown format 'nvfp6'"), ("weight", "mxfp4", "cannot be multiplied"),
        ("activation", "mxfp8_floor", "cannot be multiplied"), ("activation", "nvfp6", "unknown format 'nvfp6'"),
        ("weight", "nvfp4_rowwise", f"'{LAYER}.weight_outer' is"),
    ):  # fmt: skip
        yield from of_values("packed", why, in_metadata, ("layers", LAYER, key), [value])


def of_values(kind: str, named: str, change: Callable, path: tuple, values: list) -> Iterator[Variant]:
    """One variant for each value that stands at a path. change: `in_metadata`, or `in_json` of a file."""
    for value in values:
        yield Variant(kind, f"{path[-1]} = {short(value)}", change(*path, value=value), named)


def broken_sharing() -> Iterator[Variant]:
    gone, head = "'nothing', which 'lm_head.weight' shares", {"lm_head.weight": "embed.weight"}
    yield from of_values("packed", gone, in_metadata, ("aliases", "lm_head.weight"), ["nothing"])
    yield from of_values("packed", FILE, in_metadata, ("aliases",), [
        [], None, 5, GONE, {"lm_head.weight": 5}, {"lm_head.weight": ["embed.weight"]}, {"lm_head.weight": "gone"},
        {"lm_head.weight": "lm_head.weight"}, DEEP, head | {"nobody._extra_state": "embed.weight"},
        head | {"nobody": "embed.weight"},
    ])  # fmt: skip
    yield from of_values("packed", FILE, in_metadata, ("tied",), [{}, [5], [[]], [{}], ["nobody"], "lm_head.weight"])


def broken_buffers() -> Iterator[Variant]:
    scales, outer, data = (f"{LAYER}.weight_{part}" for part in ("scales", "outer", "data"))
    for value in (-1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf")):
        yield Variant("packed", f"outer {value}", filled(outer, value), outer)
    for value in (0x7F, 0x80, 0x81, 0xC0, 0xFF):
        yield Variant("packed", f"scale byte {value}", with_byte(scales, value), scales)
    for name in (scales, outer, data):
        yield Variant("packed", f"no {name}", lost(name), name)
        yield Variant("packed", f"{name} in float64", each([name], lambda t: t.double()), name)
        yield Variant("packed", f"{name} of another shape", each([name], lambda t: t[None]), name)
    yield Variant("packed", "codes transposed", each([data], lambda t: t.T), data)
    more = tensors(lambda found: found.update(more=torch.ones(1)))
    yield Variant("packed", "one tensor more", more, "the model has no 'more'")
    kind, scales = "packed_experts", "experts.down_proj_packed.weight_scales"
    yield Variant(kind, "NaN of E8M0", with_byte(scales, 255), scales)
    yield Variant(kind, "a scale too few", each([scales], lambda t: t[:, :-1]), scales)
    yield Variant(kind, "no scales", lost(scales), scales)
    for key, values in {
        "experts": ["2", 3, None, True],
        "in_first": ["yes", None, 0],
        "activation": ["mxfp8_32x32"],
    }.items():
        yield from of_values(kind, "experts.down_proj", in_metadata, ("experts", "experts.down_proj", key), values)
    yield from of_values(kind, "metadata", in_metadata, ("experts",), [[], 5, "x", {"experts.other": 5}])


# ---------------------------------------------------------------- configurations


GROUP = ("quantization_config", "config_groups", "group_0")


def broken_configurations() -> Iterator[Variant]:
    for kind, file in (("modelopt", HF_QUANT_CONFIG), ("modelopt", CONFIG), ("sharded", INDEX)):
        yield from (Variant(kind, f"{file}: {what}", text(file, c), file) for what, c in NO_OBJECTS.items())
    no_map = "weight_map does not give a file for each tensor"
    changes: list[tuple[str, str, str, tuple, list]] = [
        ("modelopt", HF_QUANT_CONFIG, "", ("quantization",), [[1], 5, "NVFP4", DEEP]),
        ("modelopt", HF_QUANT_CONFIG, "", ("quantization", "quant_algo"), [5, [], {}, None, "NVFP5"]),
        ("modelopt", HF_QUANT_CONFIG, "", ("quantization", "group_size"), ["16", [], 32, DEEP, 10**40]),
        ("modelopt", HF_QUANT_CONFIG, "unknown quant_algo 'NVFP4_AWQ'", ("quantization", "quant_algo"), ["NVFP4_AWQ"]),
        ("modelopt", HF_QUANT_CONFIG, "expected 16 for nvfp4, got 64", ("quantization", "group_size"), [64]),
        ("compressed", CONFIG, "", ("quantization_config",), [[1], 5, "x", None, {}, GONE]),
        ("compressed", CONFIG, "", ("quantization_config", "quant_method"), [[], 5, {}, None, "gptq", GONE]),
        ("compressed", CONFIG, "", ("quantization_config", "config_groups"), [[1], 5, "x", None, {}, GONE]),
        ("compressed", CONFIG, "", GROUP, [[1], 5, "x", None, {}]),
        ("compressed", CONFIG, "", (*GROUP, "targets"), ["Linear", 5, {}, None, [], [5], [None], [[]], ["L"]]),
        ("compressed", CONFIG, CONFIG, (*GROUP, "targets"), [["re:["], [r"re:(\w)\1"]]),
        ("compressed", CONFIG, "", (*GROUP, "weights"), [[1], 5, "x", None, {}]),
        ("compressed", CONFIG, "", (*GROUP, "input_activations"), [[1], 5, "x", {}]),
        ("compressed", CONFIG, "", (*GROUP, "weights", "num_bits"), ["4", [4], None, {}, 3, DEEP]),
        ("compressed", CONFIG, "", (*GROUP, "weights", "group_size"), ["16", [16], None, 128]),
        ("compressed", CONFIG, "", (*GROUP, "weights", "type"), [5, [], "int", None]),
        ("compressed", CONFIG, "", (*GROUP, "weights", "symmetric"), [False]),
        ("sharded", INDEX, no_map, ("weight_map",), [[], 5, "x", None, GONE, {"a": 5}, {"a": ["b"]}, DEEP]),
    ]  # fmt: skip
    for kind, file, named, path, values in changes:
        yield from of_values(kind, named, functools.partial(in_json, file), path, values)
    for value in (GONE, [1], 5, "x", None, {}, {LAYER: [1]}, {LAYER: 5}, {LAYER: {}}, {LAYER: {"quant_algo": []}}):
        mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": value}
        spoil = in_json(HF_QUANT_CONFIG, "quantization", value=mixed)
        yield Variant("modelopt", f"quantized_layers = {value}", spoil, HF_QUANT_CONFIG)
    other = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}
    yield Variant("compressed", "two groups", in_json(CONFIG, *GROUP[:2], "group_1", value=other), LAYER[:-1])


# ---------------------------------------------------------------- shards, and the tensors of published layouts


SHARD, OTHER = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def broken_shards() -> Iterator[Variant]:
    def shard(name: object) -> Callable[[Path], object]:
        """An index that has one tensor in a shard of this name."""
        return in_json(INDEX, "weight_map", f"{LAYER}.weight", value=name)

    def outside(folder: Path) -> None:
        save_file({f"{LAYER}.weight": torch.ones(1)}, folder.parent / "outside.safetensors")
        shard("../outside.safetensors")(folder)

    def with_another(folder: Path) -> None:
        save_file(load_file(folder / SHARD) | load_file(folder / OTHER), folder / SHARD)

    for name in ("../" + FILE, "/etc/passwd", "..", ".", "", "a/b.safetensors", "x" * 300, "a\0b", "\ud800"):
        yield Variant("sharded", f"shard {name[:20]!r}", shard(name), INDEX)
    why = f"shard 'gone.safetensors' of tensor '{LAYER}.weight' is missing"
    yield Variant("sharded", "shard gone", shard("gone.safetensors"), why)
    yield Variant("sharded", "shard outside", outside, INDEX)
    why = f"tensor 'x' should be in {SHARD!r}, which does not have it"
    yield Variant("sharded", "tensor that no shard has", in_json(INDEX, "weight_map", "x", value=SHARD), why)
    yield Variant("sharded", "shard removed", lambda folder: (folder / SHARD).unlink(), SHARD)
    yield Variant("sharded", "shard cut", lambda folder: (folder / SHARD).write_bytes(b"1234"), SHARD)
    yield Variant("sharded", "shard is a folder", lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()), SHARD)
    yield Variant("sharded", "shard twice", lambda f: (f / SHARD).write_bytes((f / OTHER).read_bytes()), "")
    yield Variant("sharded", "tensors in two shards", with_another, "is in several files")
    yield Variant("sharded", "index removed", lambda folder: (folder / INDEX).unlink(), "")
    yield Variant("modelopt", "no file", lambda folder: (folder / FILE).unlink(), "")


def broken_outers() -> Iterator[Variant]:
    outers = {
        "modelopt": ("weight_scale_2", "input_scale"),
        "compressed": ("weight_global_scale", "input_global_scale"),
    }
    for kind, names in outers.items():
        for name in (f"{LAYER}.{one}" for one in names):
            for value in (-1.0, 0.0, float("nan"), float("inf"), 1e-45):
                why = f"tensor {name!r}: expected a positive normal number"
                yield Variant(kind, f"{name} = {value}", filled(name, value), why)
            yield Variant(kind, f"no {name}", lost(name), f"tensor {name!r} is missing")
            for what, change in (("two of", lambda t: torch.stack([t, t])), ("float16 in", lambda t: t.half())):
                yield Variant(kind, f"{what} {name}", each([name], change), f"tensor {name!r}: expected one float32")


def broken_tensors() -> Iterator[Variant]:
    codes = {"modelopt": ("weight", (0x7F, 0x80, 0xFF)), "compressed": ("weight_packed", (0x7F, 0x90))}
    for kind, (data, bad) in codes.items():
        data, scales = f"{LAYER}.{data}", f"{LAYER}.weight_scale"
        for value in bad:
            yield Variant(
                kind, f"scale byte {value}", with_byte(scales, value), f"tensor {scales!r}: has scales that are NaN"
            )
        yield Variant(kind, "codes transposed", each([data], lambda t: t.T), f"tensor {scales!r}: expected shape")
        fewer = each([data, scales], lambda t: t[:, : 1 if t.shape[1] == 4 else t.shape[1] // 4])
        yield Variant(kind, "one block a row", fewer, f"layer {LAYER!r}: the file has in and out features")
        for name in (scales, data):
            yield Variant(kind, f"no {name}", lost(name), LAYER)
            for what, change in {
                "in int64": lambda t: t.view(torch.uint8).long(), "flat": lambda t: t.flatten(),
                "without rows": lambda t: t[:0], "of half the columns": lambda t: t[:, ::2],
            }.items():  # fmt: skip
                yield Variant(kind, f"{name} {what}", each([name], change), LAYER)
    both = blocks, scales = "experts.down_proj_blocks", "experts.down_proj_scales"
    yield Variant("gpt_oss", "NaN", with_byte(scales, 255), f"tensor {scales!r}: has scales that are NaN")
    yield Variant("gpt_oss", "fewer rows", each(both, lambda t: t[:, :32]), "the file has shape")
    yield Variant("gpt_oss", "no experts", each(both, lambda t: t[:0]), "experts.down_proj")
    for name in both:  # of this checkpoint they are what tells that it is one
        yield Variant("gpt_oss", f"no {name}", lost(name), "")
        for what, change in (
            ("int32", lambda t: t.int()),
            ("flat", lambda t: t.flatten()),
            ("short", lambda t: t[:, :, :1]),
        ):
            why = f"tensor {scales if what == 'short' else name!r}: expected uint8 of shape"
            yield Variant("gpt_oss", f"{name} {what}", each([name], change), why)


def variants() -> list[Variant]:
    """All broken checkpoints."""
    groups = (
        broken_bytes, broken_headers, broken_metadata, broken_sharing, broken_buffers, broken_configurations,
        broken_shards, broken_outers, broken_tensors,
    )  # fmt: skip
    return [variant for group in groups for variant in group()]
