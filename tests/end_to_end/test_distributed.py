"""DDP and FSDP2 on two processes against the same training in one.

What a rank quantises is its own tokens. So a recipe whose scales span no two ranks (`mxfp8`: blocks of 32 values of one
token, or of 32 tokens of one rank) gives the losses of one process with the global batch. Where a scale spans the
tensor and rounding is stochastic (`nvfp4_train`), it gives those of one process that takes each rank's share
by itself, from the same random state, and averages the gradients.
"""

import functools
import math
import re
import subprocess

import pytest
import torch

from fp4compile.distributed.gather import OVER_NVLINK
from tests.helpers import distributed_worker, process_groups, without_codegen
from tests.helpers.distributed_worker import RANKS, STEPS, Case, train_alone

pytestmark = pytest.mark.slow
CASES = ["fsdp/float32/mxfp8", "ddp/float32/mxfp8", "fsdp/bfloat16/nvfp4_train"]
MARKS = {
    "cpu": [],
    "cuda": [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="fewer than two GPUs")],
}
devices = pytest.mark.parametrize("device", [pytest.param(device, marks=marks) for device, marks in MARKS.items()])
CLOSE = 1e-5  # relative: float32 sums in another order, and what they move to the next code


def cases(wanted=lambda case: True):
    pairs = [(device, case) for device in MARKS for case in CASES if wanted(case)]
    return pytest.mark.parametrize("device, case", [pytest.param(*pair, marks=MARKS[pair[0]]) for pair in pairs])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def shared_cache(fresh_compiler, cache, monkeypatch):
    """One cache for the module: most graphs are compiled by the two processes and used by one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The runs of all cases of a device by two processes, of one start."""

    @functools.cache  # a wait in vain is not repeated by every test
    def finished(device):
        folder = tmp_path_factory.mktemp("distributed")
        output = str(folder / "runs.pt")
        method = "forkserver" if device == "cpu" else "spawn"
        arguments = [device, output, CASES]
        return process_groups.run_ranks(distributed_worker.worker, arguments, folder, method=method), output

    @functools.cache
    def run(device):
        (statuses, said), output = finished(device)
        assert statuses == [0] * RANKS, said
        return torch.load(output)

    return run


@functools.cache
def alone(device, case, parts):
    """What is expected. On a CPU no C++ is compiled for it, and the captured graphs run as they are: in float32, where
    results are rounded alike whether loops are fused or not.
    """
    parsed = Case.parse(case)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu" and parsed.dtype == "float32":
            without_codegen.install(patch)
        return train_alone(parsed, device, parts)


@cases()
def test_equals_one_process_that_takes_the_shares_one_by_one(device, case, together):
    run, expected = together(device)[case], alone(device, case, RANKS)
    assert run["losses"] == pytest.approx(expected.losses, rel=CLOSE)
    assert run["evaluated"] == pytest.approx(expected.evaluated, rel=CLOSE)
    assert len(set(run["losses"] + run["evaluated"])) == 2 * STEPS, "weights change, and evaluation sees it"
    # Blocks that are compiled one by one share one graph, which the report shows for the first of them.
    blocks = ["layers.0."] if case.startswith("fsdp") else ["layers.0.", "layers.1."]
    layers = [block + layer for block in blocks for layer in ("down", "up")]
    assert run["quantised"] == [(layer, product) for layer in layers for product in ("dgrad", "fprop", "wgrad")]
    # Of training and of evaluation; blocks that are compiled one by one, and the parts that DDP's buckets make.
    assert run["graphs"] > 2 if case.startswith("ddp") else run["graphs"] == 2


@cases(lambda case: case.endswith("mxfp8"))
def test_equals_one_process_with_the_global_batch(device, case, together):
    run, expected = together(device)[case], alone(device, case, 1)
    assert run["losses"] == pytest.approx(expected.losses, rel=CLOSE)
    assert run["evaluated"] == pytest.approx(expected.evaluated, rel=CLOSE)


@cases(lambda case: case.startswith("fsdp"))
def test_resharding_frees_the_parameters(device, case, together):
    """After forward and backward no whole parameter is there, and nothing is kept that one process would not keep."""
    run = together(device)[case]
    assert run["freed"] == [True] * 2 * STEPS
    assert run["kept"] == alone(device, case, RANKS).kept > 0


@devices
@pytest.mark.parametrize("rank", range(RANKS))
def test_gathers_of_codes_change_no_bits(device, rank, together):
    """Training with codes is the training with whole weights: losses, checkpoints, resumed steps, reports."""
    found = together(device)["gathers"][rank]
    whole, codes = found["train"][False], found["train"][True]
    assert torch.equal(codes["first"], found["alone"]), "one process that has the whole model has the same logits"
    assert codes["losses"] == whole["losses"] and codes["losses"][-1] == codes["resumed"]
    assert len({loss for step in codes["losses"] for loss in step}) == STEPS - 1
    assert codes["kept"] == whole["kept"] > 0, "a block that is resharded keeps no codes"
    assert codes["products"] == whole["products"] and {reason for *_, reason in codes["products"]} == {None}
    assert codes["state"].keys() == whole["state"].keys()
    assert all(torch.equal(codes["state"][name], value) for name, value in whole["state"].items())
    checkpointed = found["checkpointed"]
    assert checkpointed[True]["losses"] == checkpointed[False]["losses"]


@devices
def test_nvlink_alone_keeps_weights_in_high_precision(device, together):
    """nvidia-smi says here what connects the GPUs, and torch in the product."""
    (first, second), linked = (found["decided"] for found in together(device)["gathers"]), False
    if device == "cuda":
        links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
        linked = re.search(r"^GPU0\s+X\s+NV\d", links, re.MULTILINE) is not None
    assert first == second == ({OVER_NVLINK} if linked else {None})


@devices
def test_gathers_carry_the_codes_that_are_needed(device, together):
    """A rank has 4096 elements of either weight: codes of 4 bits, 16 block scales and a global scale."""
    found, bias, codes = together(device)["gathers"][0], 2 * 64, 16 * math.ceil((2048 + 16 + 4) / 16)
    # Forward and backward; then two parts of a batch, whose weights stay whole from the first part's backward on.
    assert found["train"][True]["sent"] == 5 * [2 * codes + bias]
    assert found["train"][False]["sent"] == 5 * [2 * 2 * 4096 + bias]
    # MXFP8 in blocks of 1x32, which are no others' transpose, takes both directions where a forward product is computed
    # again.
    one, both = (2 * 4096 * (1 + 1 / 32) * directions + bias for directions in (1, 2))
    assert found["checkpointed"][True]["sent"] == 2 * [one, both]


@devices
@pytest.mark.parametrize("recipe", distributed_worker.PACKED)
def test_ddp_broadcasts_no_codes(recipe, device, together):
    buffers, gradient, expected = together(device)[recipe]
    assert buffers == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    assert torch.equal(gradient, expected)
