"""Checkpoints that are broken in one place each, made of whole ones: our own files, and four published layouts.

`KINDS` are the whole ones, `variants()` the broken ones. What a variant's error has to name stands with it.
"""

import json
import struct
from collections.abc import Callable, Iterator
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
    "mxfp8": (exporter("modelopt", "mxfp8"), Net),
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


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return tensors(lambda found: found.update({name: change(found[name]).contiguous()}))


def with_byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).view(-1)[3] = value
        return tensor

    return change


def put(content: object, path: tuple, value: object) -> None:
    for key in path[:-1]:
        content = content[key]
    if value is GONE:
        del content[path[-1]]
    else:
        content[path[-1]] = value


GONE = "(gone)"  # in the place of a value: the key goes
DEEP = 900  # of lists: `json` reads so many, and `repr` may fail


def deep_list() -> list:
    value: list = []
    for _ in range(DEEP):
        value = [value]
    return value


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
    for kind in ("packed", "modelopt", "gpt_oss"):
        for part in (0, 1, 2, 7, 8, 9, 0.1, 0.3, 0.5, 0.7, 0.9, -100, -1):
            cut = (lambda n: raw(lambda b: b[: int(n * len(b)) if isinstance(n, float) else n]))(part)
            yield Variant(kind, f"cut at {part}", cut)
        for length in (0, 1, 2**20, 2**31, 2**63, 2**64 - 1):
            spoil = (lambda n: raw(lambda b: struct.pack("<Q", n) + b[8:]))(length)
            yield Variant(kind, f"header of {length} bytes", spoil)
        yield Variant(kind, "one byte more", raw(lambda b: b + b"\0"))


def broken_headers() -> Iterator[Variant]:
    scales = f"{LAYER}.weight_scales"
    whole: dict[str, bytes] = {"no UTF-8": b'{"\xff": 1}', "deep": b"[" * 50_000, "list": b"[]", "number": b"5"}
    for what, content in whole.items():
        yield Variant("packed", f"header: {what}", header(lambda _, content=content: content))
    entries: dict[str, tuple[str, object]] = {
        "unknown dtype": ("dtype", "F5"), "no dtype": ("dtype", GONE), "dtype is a number": ("dtype", 5),
        "dtype without values in torch": ("dtype", "F6_E2M3"), "negative shape": ("shape", [-64, -4]),
        "huge shape": ("shape", [2**40, 2**40]), "shape is a number": ("shape", 256), "shape is null": ("shape", None),
        "shape beyond 64 bits": ("shape", [2**70]), "deep shape": ("shape", deep_list()),
        "offsets swapped": ("data_offsets", [256, 0]), "offsets beyond": ("data_offsets", [2**40, 2**40 + 256]),
        "negative offsets": ("data_offsets", [-256, 0]), "one offset": ("data_offsets", [0]),
    }  # fmt: skip
    for what, (key, value) in entries.items():
        change = header(lambda head, key=key, value=value: put(head[scales], (key,), value))
        yield Variant("packed", what, change)
    nothing = {"dtype": "U8", "shape": [2**63, 0], "data_offsets": [0, 0]}
    yield Variant("packed", "nothing, of a huge shape", header(lambda head: head.update(nothing=nothing)))
    for value in (5, [], "x", {"fp4compile": 5}):
        yield Variant(
            "packed", f"metadata {value}", header(lambda head, value=value: put(head, ("__metadata__",), value))
        )


# ---------------------------------------------------------------- our own files


def broken_metadata() -> Iterator[Variant]:
    for what, content in NO_OBJECTS.items():
        if isinstance(content, str):
            change = header(lambda head, content=content: put(head, ("__metadata__", "fp4compile"), content))
            yield Variant("packed", f"metadata: {what}", change, "metadata")
    changes: list[tuple[tuple, list]] = [
        (("layers",), [[], None, 5, "x", GONE, deep_list()]),
        (("layers", LAYER), [[], None, {}, "x", deep_list()]),
        (("layers", LAYER, "more"), [5]),
        (("layers", LAYER, "weight"), [5, None, [], "nvfp5", "", deep_list(), "e2m1:1x16:e9m9:tensor:te", GONE]),
        (("layers", LAYER, "activation"), [5, [], {}, "mxfp8", "x", None, "nvfp4_rowwise", GONE]),
        (("layers", LAYER, "in_features"), ["64", None, True, 64.0, -64, 10**30, [64]]),
        (("layers", LAYER, "out_features"), [65, None, deep_list()]),
        (("layers", LAYER, "activation_outer"), [
            -1, 0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-39, 1e300, 10**400, "x", "0.1", True,
            [0.1], {}, deep_list(),
        ]),
    ]  # fmt: skip
    for path, values in changes:
        for value in values:
            named = LAYER if len(path) > 1 else "metadata"
            yield Variant("packed", f"{path[-1]} = {short(value)}", in_metadata(*path, value=value), named)

    of_format = {
        ("weight", "nvfp6"): "unknown format 'nvfp6'", ("weight", "mxfp4"): "cannot be multiplied",
        ("activation", "mxfp8_floor"): "cannot be multiplied", ("activation", "nvfp6"): "unknown format 'nvfp6'",
        ("weight", "nvfp4_rowwise"): f"'{LAYER}.weight_outer' is",
    }  # fmt: skip
    for (key, value), why in of_format.items():
        yield Variant("packed", f"{key} = {value}", in_metadata("layers", LAYER, key, value=value), why)


def broken_sharing() -> Iterator[Variant]:
    gone = in_metadata("aliases", "lm_head.weight", value="nothing")
    yield Variant("packed", "aliases of nothing", gone, "'nothing', which 'lm_head.weight' shares")
    changes: dict[str, list] = {
        "aliases": [[], None, 5, GONE, {"lm_head.weight": 5}, {"lm_head.weight": ["embed.weight"]},
                    {"lm_head.weight": "gone"}, {"lm_head.weight": "lm_head.weight"}, deep_list(),
                    {"lm_head.weight": "embed.weight", "nobody._extra_state": "embed.weight"},
                    {"lm_head.weight": "embed.weight", "nobody": "embed.weight"}],
        "tied": [{}, None, [5], [[]], [{}], ["nobody"], "lm_head.weight"],
    }  # fmt: skip
    for key, values in changes.items():
        for value in values:
            spoil = in_metadata(key, value=value)
            if value is None and key != "aliases":
                continue  # as in files of version 0.1
            yield Variant("packed", f"{key} = {short(value)}", spoil)


def broken_buffers() -> Iterator[Variant]:
    scales, outer, data = (f"{LAYER}.weight_{part}" for part in ("scales", "outer", "data"))
    for value in (-1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf")):
        yield Variant("packed", f"outer {value}", replaced(outer, lambda t, value=value: t.fill_(value)), outer)
    for value in (0x7F, 0x80, 0x81, 0xC0, 0xFF):
        yield Variant("packed", f"scale byte {value}", replaced(scales, with_byte(value)), scales)
    packed = "experts.down_proj_packed"
    yield Variant(
        "packed_experts", "NaN of E8M0", replaced(f"{packed}.weight_scales", with_byte(255)), f"{packed}.weight_s"
    )
    fewer = replaced(f"{packed}.weight_scales", lambda t: t[:, :-1])
    yield Variant("packed_experts", "a scale too few", fewer, f"{packed}.weight_scales")
    gone = tensors(lambda found: found.pop(f"{packed}.weight_scales"))
    yield Variant("packed_experts", "no scales", gone, f"{packed}.weight_scales")
    for name in (scales, outer, data):
        yield Variant("packed", f"no {name}", tensors(lambda found, name=name: found.pop(name)), name)
        yield Variant("packed", f"{name} in float64", replaced(name, lambda t: t.double()), name)
        yield Variant("packed", f"{name} of another shape", replaced(name, lambda t: t[None].clone()), name)
    yield Variant("packed", "codes transposed", replaced(data, lambda t: t.T), data)
    for kind in ("packed", "modelopt"):
        more = tensors(lambda found: found.update(more=torch.ones(1)))
        yield Variant(kind, "one tensor more", more, "the model has no 'more'")
    for key, values in {
        "experts": ["2", 3, None, True],
        "in_first": ["yes", None, 0],
        "activation": ["mxfp8_32x32"],
    }.items():
        for value in values:
            spoil = in_metadata("experts", "experts.down_proj", key, value=value)
            yield Variant("packed_experts", f"{key} = {value}", spoil, "experts.down_proj")
    for value in ([], 5, "x", {"experts.other": 5}):
        yield Variant("packed_experts", f"experts = {value}", in_metadata("experts", value=value), "metadata")


# ---------------------------------------------------------------- configurations


def broken_configurations() -> Iterator[Variant]:
    files = {"modelopt": (HF_QUANT_CONFIG, CONFIG), "compressed": (CONFIG,), "sharded": (INDEX,)}
    for kind, names in files.items():
        for file in names:
            yield from (Variant(kind, f"{file}: {what}", text(file, c), file) for what, c in NO_OBJECTS.items())
    changes: list[tuple[str, str, tuple, list]] = [
        ("modelopt", HF_QUANT_CONFIG, ("quantization",), [[1], 5, "NVFP4", deep_list()]),
        ("modelopt", HF_QUANT_CONFIG, ("quantization", "quant_algo"), [5, [], {}, None, "NVFP5", "MIXED_PRECISION"]),
        ("modelopt", HF_QUANT_CONFIG, ("quantization", "group_size"), ["16", [], 32, deep_list(), 10**40]),
        ("compressed", CONFIG, ("quantization_config",), [[1], 5, "x", None, {}, GONE]),
        ("compressed", CONFIG, ("quantization_config", "quant_method"), [[], 5, {}, None, "gptq", GONE]),
        ("compressed", CONFIG, ("quantization_config", "config_groups"), [[1], 5, "x", None, {}, GONE]),
        ("compressed", CONFIG, GROUP, [[1], 5, "x", None, {}]),
        ("compressed", CONFIG, (*GROUP, "targets"), ["Linear", 5, {}, None, [], [5], [None], [[]], ["L"]]),
        ("compressed", CONFIG, (*GROUP, "weights"), [[1], 5, "x", None, {}]),
        ("compressed", CONFIG, (*GROUP, "input_activations"), [[1], 5, "x", {}]),
        ("compressed", CONFIG, (*GROUP, "weights", "num_bits"), ["4", [4], None, {}, 3, deep_list()]),
        ("compressed", CONFIG, (*GROUP, "weights", "group_size"), ["16", [16], None, 128]),
        ("compressed", CONFIG, (*GROUP, "weights", "type"), [5, [], "int", None]),
        ("compressed", CONFIG, (*GROUP, "weights", "symmetric"), [False]),
        ("sharded", INDEX, ("weight_map",), [[], 5, "x", None, GONE, {"a": 5}, {"a": None}, {"a": ["b"]}, deep_list()]),
    ]  # fmt: skip
    for kind, file, path, values in changes:
        for value in values:
            why = "weight_map does not give a file for each tensor" if file == INDEX else ""
            yield Variant(kind, f"{path[-1]} = {short(value)}", in_json(file, *path, value=value), why)
    for key, value, why in (
        ("quant_algo", "NVFP4_AWQ", "unknown quant_algo 'NVFP4_AWQ'"),
        ("group_size", 64, "group_size: expected 16 for nvfp4, got 64"),
    ):
        spoil = in_json(HF_QUANT_CONFIG, "quantization", key, value=value)
        yield Variant("modelopt", f"{key} = {value}", spoil, why)
    for value in ([1], 5, "x", None, {}, {LAYER: [1]}, {LAYER: 5}, {LAYER: {}}, {LAYER: {"quant_algo": []}}):
        mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": value}
        spoil = in_json(HF_QUANT_CONFIG, "quantization", value=mixed)
        yield Variant("modelopt", f"quantized_layers = {value}", spoil, HF_QUANT_CONFIG)


GROUP = ("quantization_config", "config_groups", "group_0")
REFUSED_PATTERNS = (
    "[", "(", "*", "a**", "(?P<n", "a{2,1}", "a{99999999999999999999}", "(" * 5000, "(?:" * 2000 + ")*" * 2000,
    r"(\w)\1", "(?i)linear", "(?>a)b", "a*+b", "(?<=a+)b", "(?(1)a|b)", "\\", "a" * 20_000,
    "(?:a{1,9}b?" * 40 + "){1,9}" * 40 + "!",
)  # fmt: skip
# These match no layer, and `re.match` would not say so for years.
SLOW_PATTERNS = (
    r"(\w+)+!", r"(\w*)*!", r"(\w|\d|.)*!", r"(.*)*!", r"((\w+.?)+)+!", r"(\w+\w+)+!", r"(.*.*)*(.*.*)*!",
    r"(?=(\w+)+!).*", r"(?:.?){60}" * 20 + "!", r"(\w?\w?)*!", r".*" * 200 + "!", r"(?:(?:\w+.)+\w+.?)+!",
)  # fmt: skip


def broken_targets() -> Iterator[Variant]:
    for pattern in (*REFUSED_PATTERNS, *SLOW_PATTERNS):
        spoil = in_json(CONFIG, *GROUP, "targets", value=[f"re:{pattern}"])
        yield Variant("compressed", f"pattern {pattern[:40]}", spoil, CONFIG)
    other = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "group_size": 32}}
    yield Variant("compressed", "two groups", in_json(CONFIG, *GROUP[:2], "group_1", value=other), LAYER[:-1])


# ---------------------------------------------------------------- shards, and the tensors of published layouts


def shard(name: object) -> Callable[[Path], object]:
    """An index that has one tensor in a shard of this name."""
    return in_json(INDEX, "weight_map", f"{LAYER}.weight", value=name)


def broken_shards() -> Iterator[Variant]:
    def outside(folder: Path) -> None:
        save_file({f"{LAYER}.weight": torch.ones(1)}, folder.parent / "outside.safetensors")
        shard("../outside.safetensors")(folder)

    names = (
        "../" + FILE,
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b.safetensors",
        "gone.safetensors",
        "x" * 300,
        "a\0b",
        "\ud800",
    )
    for name in names:
        why = f"shard {name!r} of tensor '{LAYER}.weight' is missing" if name == "gone.safetensors" else INDEX
        yield Variant("sharded", f"shard {name[:20]!r}", shard(name), why)
    yield Variant("sharded", "shard outside", outside, INDEX)
    why = f"tensor 'x' should be in {SHARD!r}, which does not have it"
    yield Variant("sharded", "tensor that no shard has", in_json(INDEX, "weight_map", "x", value=SHARD), why)
    yield Variant("sharded", "shard removed", lambda folder: (folder / SHARD).unlink(), SHARD)
    yield Variant("sharded", "shard cut", lambda folder: (folder / SHARD).write_bytes(b"1234"), SHARD)
    yield Variant("sharded", "shard is a folder", lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()), SHARD)
    copies = lambda folder: (folder / SHARD).write_bytes((folder / OTHER).read_bytes())  # noqa: E731
    yield Variant("sharded", "shard twice", copies, "")

    def with_another(folder: Path) -> None:
        save_file(load_file(folder / SHARD) | load_file(folder / OTHER), folder / SHARD)

    yield Variant("sharded", "tensors in two shards", with_another, "is in several files")
    yield Variant("sharded", "index removed", lambda folder: (folder / INDEX).unlink(), "")
    yield Variant("modelopt", "no file", lambda folder: (folder / FILE).unlink(), "")


SHARD, OTHER = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def broken_tensors() -> Iterator[Variant]:
    outers = {
        "modelopt": ("weight_scale_2", "input_scale"),
        "compressed": ("weight_global_scale", "input_global_scale"),
    }
    for kind, names in outers.items():
        for name in (f"{LAYER}.{one}" for one in names):
            for value in (-1.0, 0.0, float("nan"), float("inf"), 1e-45, 1e30 if kind == "modelopt" else 1e-30):
                spoil = replaced(name, lambda t, value=value: t.fill_(value))
                why = f"{value:g}, as the " if 1e-40 < value < 1e40 else "expected a positive normal number"
                yield Variant(kind, f"{name} = {value}", spoil, f"tensor {name!r}: {why}")
            gone = tensors(lambda found, name=name: found.pop(name))
            yield Variant(kind, f"no {name}", gone, f"tensor {name!r} is missing")
            for what, change in (("two of", lambda t: torch.stack([t, t])), ("float16 in", lambda t: t.half())):
                yield Variant(kind, f"{what} {name}", replaced(name, change), f"tensor {name!r}: expected one float32")
    codes = {"modelopt": ("weight", (0x7F, 0x80, 0xFF)), "compressed": ("weight_packed", (0x7F, 0x90)),
             "mxfp8": ("weight", (255,))}  # fmt: skip
    for kind, (data, bad) in codes.items():
        scales = f"{LAYER}.weight_scale"
        for value in bad:
            why = f"tensor {scales!r}: has scales that are NaN"
            yield Variant(kind, f"scale byte {value}", replaced(scales, with_byte(value)), why)
        if kind != "mxfp8":  # whose codes are square
            transposed = replaced(f"{LAYER}.{data}", lambda t: t.T)
            yield Variant(kind, "codes transposed", transposed, f"tensor {scales!r}: expected shape")
            parts = {scales: lambda t: t[:, :1].clone(), f"{LAYER}.{data}": lambda t: t[:, : t.shape[1] // 4].clone()}
            fewer = tensors(lambda found, parts=parts: found.update({n: cut(found[n]) for n, cut in parts.items()}))
            yield Variant(kind, "one block a row", fewer, f"layer {LAYER!r}: the file has in and out features")
        for name in (scales, f"{LAYER}.{data}"):
            yield Variant(kind, f"no {name}", tensors(lambda found, name=name: found.pop(name)), LAYER)
            yield Variant(kind, f"{name} in int64", replaced(name, lambda t: t.view(torch.uint8).long()), LAYER)
            yield Variant(kind, f"{name} flat", replaced(name, lambda t: t.flatten()), LAYER)
            yield Variant(kind, f"{name} without rows", replaced(name, lambda t: t[:0].clone()), LAYER)
            yield Variant(kind, f"{name} of half the columns", replaced(name, lambda t: t[:, ::2]), LAYER)
    blocks, scales = "experts.down_proj_blocks", "experts.down_proj_scales"
    why = f"tensor {scales!r}: has scales that are NaN"
    yield Variant("gpt_oss", "NaN", replaced(scales, with_byte(255)), why)
    fewer = {name: lambda t: t[:, :32].clone() for name in (blocks, scales)}
    less = tensors(lambda found: found.update({name: cut(found[name]) for name, cut in fewer.items()}))
    yield Variant("gpt_oss", "fewer rows", less, "the file has shape")
    empty = tensors(lambda found: found.update({blocks: found[blocks][:0].clone(), scales: found[scales][:0].clone()}))
    yield Variant("gpt_oss", "no experts", empty, "experts.down_proj")
    for name in (blocks, scales):  # of this checkpoint they are what tells that it is one
        yield Variant("gpt_oss", f"no {name}", tensors(lambda found, name=name: found.pop(name)), "")
        for what, change in {
            "int32": lambda t: t.int(),
            "flat": lambda t: t.flatten(),
            "short": lambda t: t[:, :, :1].clone(),
        }.items():
            why = f"tensor {scales if what == 'short' else name!r}: expected uint8 of shape"
            yield Variant("gpt_oss", f"{name} {what}", replaced(name, change), why)


def variants() -> list[Variant]:
    """All broken checkpoints."""
    groups = (
        broken_bytes, broken_headers, broken_metadata, broken_sharing, broken_buffers, broken_configurations,
        broken_targets, broken_shards, broken_tensors,
    )  # fmt: skip
    return [variant for group in groups for variant in group()]
