"""The lines of docs/launchers.md that start a script which does not know of this package."""

import copy
import importlib.machinery
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fp4compile
import fp4compile_autoload
from fp4compile import _inductor_patches
from fp4compile.registration import is_backend
from fp4compile.report.names import unwrapped
from tests.helpers import without_codegen

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
# The models have no bias and no other operation, so that no C++ is compiled.
SCRIPT = """
import sys, torch, accelerate, transformers
assert "fp4compile" not in sys.modules
packed = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    assert torch.equal(packed(torch.arange(8)[None]).logits, torch.load(sys.argv[2]))
accelerator = accelerate.Accelerator(cpu=True)
layers = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False)
model = accelerator.prepare(torch.nn.Sequential(*layers))
accelerator.backward(model(torch.randn(4, 64)).sum())
from fp4compile.registration import named_reports
print([report.summary() for report in named_reports()])
"""

PREPARED = """
import json, os, sys, torch, accelerate
from pathlib import Path

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.layer(x)

accelerator = accelerate.Accelerator(cpu=True)
model = accelerator.prepare(Net())
with torch.no_grad():
    model(torch.randn(4, 64))
from fp4compile.registration import named_reports
found = {"rank": accelerator.process_index, "ranks": accelerator.num_processes, "argv": sys.argv[1:],
         "said": [report.summary() for report in named_reports()]}
(Path(__file__).parent / f"rank{found['rank']}.json").write_text(json.dumps(found))
"""
ROOT = Path(__file__).parents[2]


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    return transformers.LlamaForCausalLM(config).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(8)[None]).logits


@pytest.fixture
def script(tmp_path):
    """The command line of a script that loads a packed model and prepares one with accelerate."""
    model = llama()
    fp4compile.pack_(model, "nvfp4")
    model.save_pretrained(tmp_path / "packed")
    torch.save(logits(model), tmp_path / "logits.pt")
    (tmp_path / "train.py").write_text(SCRIPT)
    return [str(tmp_path / name) for name in ("train.py", "packed", "logits.pt")]


def printed(command, **environment):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_accelerates_flag(script, monkeypatch, capfd):
    """The launcher runs in this process, the script in one that does not import this package by itself."""
    from accelerate.commands import launch

    flags = ["--cpu", "--num_processes", "1", "--mixed_precision", "no", "--dynamo_backend", "fp4compile_nvfp4"]
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the launcher writes into it
    launch.launch_command(launch.launch_command_parser().parse_args([*flags, *script]))
    assert "recipe nvfp4: 5 of 5" in capfd.readouterr().out


def test_accelerates_variable(monkeypatch):
    """`accelerate launch` itself passes its choice on to the script by this variable."""
    from accelerate.utils import TorchDynamoPlugin

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "fp4compile_mxfp8")
    assert TorchDynamoPlugin().to_kwargs()["backend"].lower() == "fp4compile_mxfp8"


def test_accelerates_file_and_two_ranks(tmp_path, monkeypatch, capfd):
    """The launcher, which is torchrun's, runs in this process, and `python -m fp4compile run` on each rank.

    Port 0 is any free one: without it, two launches at one moment may both find 29500 free, and one fails.
    """
    from accelerate.commands import launch

    (tmp_path / "config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 1\n"
        "machine_rank: 0\nmixed_precision: 'no'\nmain_process_port: 0\n"
        "dynamo_config:\n  dynamo_backend: FP4COMPILE_NVFP4\n"
    )
    (tmp_path / "prepared.py").write_text(PREPARED)
    flags = ["--config_file", str(tmp_path / "config.yaml"), "-m", "fp4compile", "run", str(tmp_path / "prepared.py"),
             "--flag", "a b"]  # fmt: skip
    monkeypatch.setattr(os, "environ", os.environ | {"PYTHONPATH": str(ROOT)})
    launch.launch_command(launch.launch_command_parser().parse_args(flags))
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [(one["rank"], one["ranks"], one["argv"]) for one in found] == [(r, 2, ["--flag", "a b"]) for r in range(2)]
    printed = capfd.readouterr().err
    assert all(f"rank {rank}: recipe nvfp4: 1 of 1 matmuls quantised" in printed for rank in range(2))
    assert all(one["said"][0].startswith("recipe nvfp4: 1 of 1 matmuls quantised") for one in found)


def test_names_are_added_to_a_module_that_is_under_way(monkeypatch):
    """accelerate's own import of torch calls `watch`, and only later makes the enumeration."""
    module, added = types.ModuleType("half"), []
    module.__spec__ = importlib.machinery.ModuleSpec("half", None)
    module.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "half", module)
    monkeypatch.setattr(fp4compile_autoload, "_waiting", {"half": added.append})
    fp4compile_autoload.watch()
    assert added == []
    module.__spec__._initializing = False
    importlib.util.find_spec("another_module_that_does_not_exist")
    assert added == [module]


def test_importing_torch_imports_no_more_of_this_package():
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('fp4compile')])"
    assert printed(["-c", code]).strip() == "['fp4compile_autoload']"


class Regression(torch.nn.Module):
    """A model as the Trainer takes it: it returns its loss."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))

    def forward(self, x, labels):
        y = self.layers(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


@pytest.fixture
def own_accelerator(monkeypatch):
    """What accelerate knows of the process, and the variables that transformers sets for it, end with the test."""
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(os, "environ", os.environ.copy())
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("how", ("flags", "compiled in place", "run --in-place"))
@pytest.mark.usefixtures("own_accelerator")
def test_what_the_trainer_evaluates(how, tmp_path, monkeypatch):
    """With the flags alone, the unquantised model."""
    without_codegen.install(monkeypatch)
    monkeypatch.setattr(torch, "compile", torch.compile)  # is put back after the test
    model = Regression()
    samples = [{"x": torch.randn(64), "labels": torch.randn(64)} for _ in range(4)]
    flags = {"torch_compile_backend": "fp4compile_nvfp4"} if how != "compiled in place" else {}
    if how == "compiled in place":
        model.compile(backend="fp4compile_nvfp4")
    elif how == "run --in-place":
        _inductor_patches.compile_in_place(is_backend, unwrapped)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", **flags
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=samples, eval_dataset=samples)
    trainer.train()
    with torch.no_grad():
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            plain = model(**batch)["loss"].item()
        quantised = torch.compile(copy.deepcopy(model), backend="fp4compile_nvfp4")(**batch)["loss"].item()
    assert abs(plain - quantised) > 1e-4
    expected = plain if how == "flags" else quantised
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
