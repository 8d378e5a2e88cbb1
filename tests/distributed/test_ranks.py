"""Two ranks, a part of the world, against one process that has the whole model: see tests/helpers/rank_worker.py."""

import functools

import pytest
import torch

from tests.helpers import moving_worker, process_groups, rank_worker
from tests.helpers.moving_worker import tokens
from tests.helpers.rank_worker import KINDS, MEMBERS, MOVED, TOKENS

pytestmark = pytest.mark.slow
DEVICES = {
    "cpu": [],
    "cuda": [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")],
}
# A share of the largest result, 34 times 2^-24. The errors of an addition, evenly spread over 2 * 2^-24 of its sum, add
# up over 96 products in each of two orders, whose sums grow to the result, to a standard deviation of sqrt(2 * 96 / 6)
# times 2^-24: six of these. A GPU's matrix units drop the bits that do not fit, where a CPU rounds, so an error is at
# most twice as large.
SUMS = {"cpu": 2e-6, "cuda": 4e-6}
devices = pytest.mark.parametrize("device", [pytest.param(device, marks=marks) for device, marks in DEVICES.items()])
places = pytest.mark.parametrize("place", range(len(MEMBERS)))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each member found by a device, and what was said to the one whose partner did not come, and was gone."""

    @functools.cache
    def ran(device):
        folder = tmp_path_factory.mktemp("ranks")
        output = str(folder / "runs")
        method = "forkserver" if device == "cpu" else "spawn"
        statuses, said = process_groups.run_ranks(rank_worker.main, [output, device], folder, ranks=3, method=method)
        return statuses, said, output

    def of(device):
        statuses, said, output = ran(device)
        assert statuses == [0] * 3, said
        lost = torch.load(f"{output}.lost.pt") if device == "cpu" else None
        return [torch.load(f"{output}.{rank}.pt") for rank in MEMBERS], lost

    return of


@pytest.fixture(scope="module")
def alone():
    """Steps of one process by a device, by their kind."""
    return functools.cache(lambda device: rank_worker.on_cpu(rank_worker.steps_of_one_process(device)))


@places
@devices
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallelism_has_the_codes_of_one_process(device, kind, place, found, alone):
    """So results and gradients differ by the order of sums alone, under recipes without scales of whole tensors."""
    mine, whole = found(device)[0][place][kind], alone(device)[kind]
    part = slice(None) if kind == "tokens" else slice(place * TOKENS, (place + 1) * TOKENS)
    for name in set(mine) - {"told"}:
        expected = whole[name][:, part] if name in "xy" else whole[name]
        torch.testing.assert_close(mine[name], expected, rtol=0, atol=SUMS[device] * expected.abs().max().item())
    products = ("fprop", "dgrad") if kind == "frozen" else ("fprop", "dgrad", "wgrad")
    assert mine["told"].keys() == {f"{layer} {product}" for layer in ("up", "down") for product in products}
    after = "quantised after all_gather_into_tensor: "
    elsewhere, columns = f"{after}its rows are read elsewhere, too", f"{after}columns are quantised"
    assert {name: told for name, told in mine["told"].items() if told} == {
        "tokens": {},
        "frozen": dict.fromkeys(("up fprop", "down dgrad"), "quantised before all_gather_into_tensor"),
        "sequences": {"up fprop": columns, "down dgrad": elsewhere, "down wgrad": elsewhere},
    }[kind], "a gather of gradients that a bias gradient needs, too, is in high precision, once"


@places
@devices
@pytest.mark.parametrize("kind", ["rows", "again"])
def test_parameters_that_the_graph_gathers_have_the_bits_of_one_process(kind, device, place, found, alone):
    """Both ranks have the same tokens: gradients, which are summed, are twice those of one.

    A weight is gathered for both passes, whose codes are saved; or again for the backward pass.
    """
    mine, expected = found(device)[0][place]["gathered"][kind], alone(device)[kind]
    names = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert torch.equal(mine["y"], expected["y"]) and torch.equal(mine["x"], expected["x"])
    assert all(torch.equal(mine[name], 2 * expected[name]) for name in names)
    assert mine["told"].keys() == expected["told"].keys() and len(mine["told"]) == 6
    assert torch.equal(mine["evaluated"], expected["y"])


@places
@devices
def test_codes_are_gathered_by_inductors_kernels(device, place, found, alone):
    mine, part = found(device)[0][place], slice(place * TOKENS, (place + 1) * TOKENS)
    expected = alone(device)["inference"]["y"][:, part]
    torch.testing.assert_close(mine["inference"], expected, rtol=0, atol=SUMS[device] * expected.abs().max().item())
    assert mine["told"] == {"up": "quantised before all_gather_into_tensor", "down": None}


@pytest.mark.parametrize("recipe", MOVED)
@places
@devices
def test_moved_codes_have_the_bits_of_one_process(device, place, recipe, found):
    """Codes and scales are gathered, and results have the bits of one process with all the tokens.

    Tokens stay bf16 where a global scale is made of all of them.
    """
    (gathered, sequences), count, moved = found(device)[0][place]["moved"][recipe]
    everything = [tokens(rank) for rank in range(len(MEMBERS))]
    assert torch.equal(gathered, moving_worker.alone(torch.cat(everything), recipe, device))
    joined = torch.cat([rows.view(2, -1, moving_worker.K) for rows in everything], 1)
    assert torch.equal(sequences, moving_worker.alone(joined, recipe, device))
    parts = ["bf16"] if recipe == "nvfp4" else ["u8"] * 2 + ["f32"] * (recipe == "nvfp4_rowwise")  # of a gather
    assert count == (0 if recipe == "nvfp4" else 2) and moved == {"all_gather_into_tensor": parts * 2}


@places
def test_ranks_of_different_settings_raise(place, found):
    recipes, rules, gathers = found("cpu")[0][place]["unlike"]
    assert "rank 0: recipe 'mxfp8' with" in recipes and "rank 1: recipe 'nvfp4' with" in recipes
    assert "rank 0: recipe 'mxfp8' with rules=[]; rank 1: recipe 'mxfp8' with rules=[" in rules
    assert "rank 0: recipe 'mxfp8' with gather_quantized_(recompute)=False; rank 1" in gathers


def test_a_rank_that_ends_or_hangs_ends_the_other(found):
    """By gloo's own error, after a compilation that waited for it in vain."""
    hung, lost = said_to = found("cpu")[1]
    assert "imed out" in hung and "imed out" not in lost, said_to
    for said in (hung, lost):
        assert said.startswith(("RuntimeError: ", "DistBackendError: ")) and "settings" not in said, said
