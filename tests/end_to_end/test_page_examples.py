"""The code of README and docs/: every block of Python runs, in the order of its page, and every command is one.

A block runs in a folder of its page, with the names that the page's earlier blocks have left, and with what a reader
brings along (`BROUGHT`): a model, a batch, a checkpoint. What it compiles is called once, so that a backend captures a
graph and its recipe decides. Graphs run as captured: other tests generate code.
"""

import argparse
import contextlib
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

import fp4compile
from fp4compile import _compat
from fp4compile.cli import main as command_line
from tests.helpers import process_groups, without_codegen
from tests.helpers.checkpoints import DATA, tensors_of
from tests.helpers.expert_models import Around, Forms
from tests.helpers.packed_models import TOKENS, Net

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
Names = dict[str, Any]


# ---------------------------------------------------------------- what a reader brings along


def network() -> Names:
    return {"model": Net(), "tokens": TOKENS}


def readme_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).bfloat16()


def layers() -> Names:
    return {"model": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), "x": torch.randn(4, 64)}


def llama() -> Names:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    return {"model": model, "tokens": TOKENS, "batches": [TOKENS, TOKENS + 1],
            "AutoModelForCausalLM": transformers.AutoModelForCausalLM}  # fmt: skip


def llama_in(folder: str) -> Names:
    """A Llama, and its checkpoint."""
    brought = llama()
    brought["model"].save_pretrained(folder)
    return brought


def blocks_of_llama() -> Names:
    return {"model": llama()["model"].model, "tokens": TOKENS, "recipe": {"rules": [("layers.0.mlp.*", "mxfp8")]}}


def alone() -> None:
    """Begin a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def blocks_to_shard() -> Names:
    """The blocks of a Llama, in a group of one process."""
    alone()
    return {"model": llama()["model"].model, "tokens": TOKENS}


def adapted() -> Names:
    """A packed Llama with adapters, in a group of one process."""
    alone()
    model = llama()["model"]
    fp4compile.pack_(model, "nvfp4")
    return {"model": peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")), "tokens": TOKENS}


def checkpoint_in(folder: str, of: str, dtype: torch.dtype = torch.float32) -> Names:
    """One of the checkpoints of tests/data, what is not quantised in a dtype; and an unpacked model for it."""
    shutil.copytree(DATA / of, folder)
    tensors = {name: tensor if "scale" in name or tensor.dtype == torch.uint8 else tensor.to(dtype)
               for name, tensor in tensors_of(folder).items()}  # fmt: skip
    safetensors.save_file(tensors, f"{folder}/model.safetensors")
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config)
    return {"config": config, "fresh_model": model, "transformers": transformers}


def gpt_oss_in(folder: str) -> Names:
    """A checkpoint in which the experts are in MXFP4, as it was published."""
    config = transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    tensors = transformers.GptOssForCausalLM(config).bfloat16().state_dict()
    for name in [name for name in tensors if re.search(r"\.experts\.\w+_proj$", name)]:
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, outer, inner // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 120, dtype=torch.uint8)
    Path(folder).mkdir()
    safetensors.save_file(tensors, f"{folder}/model.safetensors")
    return {"config": config, "transformers": transformers}


# By page, and by the heading above a block; "" is the top of the page. A page also has torch and fp4compile.
BROUGHT: dict[str, dict[str, Callable[[], Names]]] = {
    "README.md": {
        "": lambda: {"x": torch.randn(64, 1024, dtype=torch.bfloat16)},
        "Inference": lambda: {"fresh_model": readme_model()},
    },
    "docs/adapters.md": {"": lambda: llama_in("a-llama") | {"peft": peft}, "Several GPUs": adapted},
    "docs/experts.md": {
        "": layers, "Eagerly": lambda: {"x": torch.randn(40, 64), "w": torch.randn(3, 96, 64)},
        "Packing": lambda: {"model": Around(Forms(True))}, "gpt-oss as published": lambda: gpt_oss_in("gpt-oss-20b"),
        "Checkpoints with experts":
            lambda: checkpoint_in("Qwen3-30B-A3B-NVFP4", "modelopt_nvfp4_mixtral", torch.bfloat16),
    },
    "docs/distributed.md": {"Quantise once, then move": blocks_to_shard},
    "docs/index.md": {"": network},
    "docs/inference.md": {
        "": layers, "Better scales for the weights": layers,
        "Codes by sample inputs": lambda: layers() | {"batches": [torch.randn(64, 64)]},
        "Files": lambda: {"fresh_model": layers()["model"]},
        "Checkpoints of other libraries":
            lambda: checkpoint_in("published-checkpoint", "modelopt_nvfp4"),
        "transformers": lambda: checkpoint_in("published-fp8", "modelopt_nvfp4") | llama_in("plain"),
        "Calibration": llama,
    },
    "docs/ptxsim.md": {"": dict},
    "docs/recipes.md": {"": dict},
    "docs/report.md": {
        "": network, "Predicted times": lambda: {"config": transformers.LlamaConfig(**SIZES),
                                                 "LlamaForCausalLM": transformers.LlamaForCausalLM},
    },
    "docs/roofline.md": {"": dict},
    "docs/training.md": {
        "": layers, "Blocks compiled one by one": blocks_of_llama,
        "Quantisation-aware training, then packing": layers,
    },
}  # fmt: skip

# What the page says that this torch refuses, by page and heading: a part of the message.
REFUSED: dict[tuple[str, str], str] = {}
if not _compat.SHARDS_INTEGERS:
    REFUSED["docs/adapters.md", "Several GPUs"] = "its fully_shard takes no parameters of integers"


# ---------------------------------------------------------------- blocks of Python


class Block(NamedTuple):
    """A block of Python. heading: of the page's section that it is in, "" before the first. line: of its code."""

    heading: str
    line: int
    code: str


def blocks(text: str) -> Iterator[Block]:
    heading, first = "", True
    for part in re.finditer(r"^#+ (.+)$|^```(\w*).*\n((?:.*\n)*?)```$", text, re.MULTILINE):
        if part[1]:
            heading, first = "" if first else part[1], False  # the first is the page's title
        elif part[2] == "python":
            yield Block(heading, text.count("\n", 0, part.start(3)) + 1, part[3])


class Reader:
    """Runs the blocks of a page, one after the other."""

    def __init__(self, page: str) -> None:
        self.page, self.brought = page, dict(BROUGHT[page])
        self.names: Names = {"torch": torch, "fp4compile": fp4compile}
        self.batch, self.called = None, set()
        self.bring("")

    def bring(self, heading: str) -> None:
        found = self.brought.pop(heading, dict)()
        self.batch = found.get("tokens", found.get("x", self.batch))
        self.names |= found

    def run(self, block: Block) -> None:
        if block.heading:
            self.bring(block.heading)
        lines = "\n" * (block.line - 1) + block.code  # so that an error has the page's line
        exec(compile(lines, str(PAGES[self.page]), "exec"), self.names)
        for name, value in list(self.names.items()):
            if is_compiled(name, value) and id(value) not in self.called:
                self.called.add(id(value))
                result = value(self.batch)
                result = result if isinstance(result, torch.Tensor) else result[0]
                if result.requires_grad:
                    result.sum().backward()


def is_compiled(name: str, value: Any) -> bool:
    """Whether it is a compiled model, or the page's model, whose blocks are compiled in place."""
    in_place = name == "model" and any(each._compiled_call_impl for each in value.modules())
    return in_place or isinstance(value, OptimizedModule)


def test_blocks_are_found():
    page = "# Title\n\n```python\na\n```\n\n## Part\n\n```text\nb\n```\n\n### Inner\n```python\nc\nd\n```\n"
    assert list(blocks(page)) == [("", 4, "a\n"), ("Inner", 15, "c\nd\n")]


@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if "```python" in path.read_text("utf-8")])
def test_blocks_of_python_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ())  # pages set it
    without_codegen.install(monkeypatch)
    reader = Reader(page)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.filterwarnings("error", ".*quantised nothing")
        stack.callback(process_groups.end)
        for block in blocks(PAGES[page].read_text("utf-8")):
            refused = REFUSED.get((page, block.heading))
            with pytest.raises(RuntimeError, match=refused) if refused else contextlib.nullcontext():
                reader.run(block)
    assert not reader.brought, "headings that no block is under"


# ---------------------------------------------------------------- commands


def commands(text: str) -> Iterator[tuple[bool, list[str]]]:
    """(whether it is in a span of a sentence, where it may lack arguments; the words) of each command."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    starts = r"(?:[A-Z_]+=\S+ )?(?:python|torchrun|accelerate|make) "
    for part in re.finditer(rf"^    ({starts}.+)$|`({starts}[^`]+)`", text, re.MULTILINE):
        yield part[1] is None, shlex.split(part[1] or part[2], comments=True)


def parser_of(command: str) -> argparse.ArgumentParser:
    (subparsers,) = (action for action in command_line._parser()._actions if action.dest == "command")
    return subparsers.choices[command]


def check_own(arguments: list[str], in_sentence: bool) -> None:
    """Of `python -m fp4compile`."""
    if not in_sentence:
        command_line._parser().parse_args(arguments)
    elif arguments:
        known = parser_of(arguments[0])._option_string_actions
        options = [word for word in arguments[1:] if word.startswith("--")]
        assert arguments[0] == "run" or set(options) <= known.keys(), arguments
    if arguments and arguments[0] == "recipes" and arguments[1:] != ["NAME"]:
        assert command_line.main(arguments) == 0


def test_every_command_is_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()  # `run` looks for its script
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    checked = 0
    for path in PAGES.values():
        for in_sentence, words in commands(path.read_text("utf-8")):
            if words[0] == "make":
                assert words[1] in targets, words
            elif "-m" in words:
                module = words[words.index("-m") + 1]
                assert find_spec(module), words
                if module == "fp4compile":
                    check_own(words[words.index("-m") + 2 :], in_sentence)
                    checked += 1
            else:
                scripts = [word for word in words if word.startswith("examples/")]
                assert all((ROOT / script).exists() for script in scripts), words
    assert checked > 15
    assert "nvfp4" in capsys.readouterr().out
