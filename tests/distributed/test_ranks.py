"""Two ranks, a part of the world, against one process that has the whole model: see tests/helpers/rank_worker.py."""

import pytest
import torch

from tests.helpers import moving_worker, process_groups, rank_worker, without_codegen
from tests.helpers.moving_worker import SENT, tokens
from tests.helpers.rank_worker import INVERTED, MEMBERS, MOVED, OF_ROWS, TOKENS

pytestmark = pytest.mark.slow
# A share of the largest result, 34 times 2^-24. Sums of up to 96 products in two orders differ by up to 190 times 2^-24
# of the sum of the magnitudes of their products.
SUMS = 2e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each member found, and what was said to the one whose partner did not come, and was gone."""
    folder = tmp_path_factory.mktemp("ranks")
    output = str(folder / "runs")
    statuses, said = process_groups.run_ranks(rank_worker.main, [output], folder, ranks=3)
    assert statuses == [0] * 3, said
    return [torch.load(f"{output}.{rank}.pt") for rank in MEMBERS], torch.load(f"{output}.lost.pt")


@pytest.fixture(scope="module")
def alone():
    """Steps of one process, by their kind."""
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch)
        recipes = ("nvfp4", INVERTED, "nvfp4_train", *OF_ROWS)
        plain, inverted, square, *rows = (rank_worker.step(*rank_worker.whole(), recipe) for recipe in recipes)
    found = {"sequences": plain, "frozen": plain, "tokens": inverted, "inference": square}
    return found | dict(zip(OF_ROWS, rows, strict=True))


@pytest.mark.parametrize("place", range(len(MEMBERS)))
@pytest.mark.parametrize("kind", ["sequences", "tokens", "frozen", *OF_ROWS])
def test_tensor_parallelism_has_the_codes_of_one_process(kind, place, found, alone):
    """So results and gradients differ by the order of sums alone; shards with scales of their own are percents off."""
    mine = found[0][place][kind]
    part = slice(place * TOKENS, (place + 1) * TOKENS) if kind in ("sequences", "frozen") else slice(None)
    for name in set(mine) - {"told"}:
        expected = alone[kind][name][:, part] if name in "xy" else alone[kind][name]
        torch.testing.assert_close(mine[name], expected, rtol=0, atol=SUMS * expected.abs().max().item())
    products = ("fprop", "dgrad") if kind == "frozen" else ("fprop", "dgrad", "wgrad")
    assert mine["told"].keys() == {f"{layer} {product}" for layer in ("up", "down") for product in products}
    scaled = {name for name, told in mine["told"].items() if told and "outer scale of 2 ranks" in told}
    # Rows of a weight gradient's operands are tokens, which each rank has whole.
    assert scaled == ({"up dgrad", "down fprop"} if kind == "float8_rowwise" else set(mine["told"]))
    if kind in OF_ROWS:
        return
    after = "quantised after all_gather_into_tensor: "
    gathered = {name: told.rpartition("; ")[2] for name, told in mine["told"].items() if "all_gather" in told}
    assert (
        gathered
        == {
            "tokens": {},
            "frozen": dict.fromkeys(("up fprop", "down dgrad"), "quantised before all_gather_into_tensor"),
            "sequences": {
                "up fprop": f"{after}columns are quantised",
                **dict.fromkeys(("down dgrad", "down wgrad"), f"{after}its rows are read elsewhere, too"),
            },
        }[kind]
    ), "a gather that a weight gradient needs, too, is in high precision, once"


@pytest.mark.parametrize("place", range(len(MEMBERS)))
def test_parameters_that_the_graph_gathers_have_the_bits_of_one_process(place, found, alone):
    """Both ranks have the same tokens: gradients, which are summed, are twice those of one."""
    mine, expected = found[0][place]["gathered"], alone["frozen"]
    names = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert torch.equal(mine["y"], expected["y"]) and torch.equal(mine["x"], expected["x"])
    assert all(torch.equal(mine[name], 2 * expected[name]) for name in names)
    assert mine["told"].keys() == expected["told"].keys() and len(mine["told"]) == 6
    assert torch.equal(mine["evaluated"], expected["y"])
    assert mine["moved"] == dict.fromkeys(("up", "down"), "quantised before all_gather_into_tensor")


@pytest.mark.parametrize("place", range(len(MEMBERS)))
def test_codes_are_gathered_and_shards_have_one_scale(place, found, alone):
    mine, expected = found[0][place], alone["inference"]["y"][:, place * TOKENS : (place + 1) * TOKENS]
    torch.testing.assert_close(mine["inference"], expected, rtol=0, atol=SUMS * expected.abs().max().item())
    scale = "outer scale of 2 ranks"
    assert mine["told"] == {"up": f"{scale}; quantised before all_gather_into_tensor", "down": scale}


@pytest.mark.parametrize("recipe", MOVED)
@pytest.mark.parametrize("place", range(len(MEMBERS)))
def test_moved_codes_have_the_bits_of_one_process(place, recipe, found):
    """Codes and scales are gathered and exchanged, and results have the bits of one process with all the tokens.

    An outer scale of all tokens is made of the largest magnitude of both processes; exchanged tokens stay bf16 then.
    """
    (gathered, sequences, exchanged), count, moved = found[0][place]["moved"][recipe]
    everything = [tokens(rank) for rank in range(len(MEMBERS))]
    first = [rows[:6] for rows in everything]
    sent = [rows.split(SENT[source])[place] for source, rows in enumerate(everything)]
    assert torch.equal(gathered, moving_worker.alone(torch.cat(first), recipe))
    joined = torch.cat([rows.view(2, 3, moving_worker.K) for rows in first], 1)
    assert torch.equal(sequences, moving_worker.alone(joined, recipe))
    assert torch.equal(exchanged, moving_worker.alone(torch.cat(sent), recipe))
    dtypes = {"all_gather_into_tensor": ["u8"] * 4, "all_to_all_single": ["u8"] * 2}
    if recipe == "nvfp4":
        dtypes |= {"all_reduce": ["i32"] * 2, "all_to_all_single": ["bf16"]}
    assert count == (2 if recipe == "nvfp4" else 3) and moved == dtypes


@pytest.mark.parametrize("place", range(len(MEMBERS)))
def test_ranks_of_different_settings_raise(place, found):
    recipes, rules, gathers = found[0][place]["unlike"]
    assert "rank 0: recipe 'mxfp8' with" in recipes and "rank 1: recipe 'nvfp4' with" in recipes
    assert "rank 0: recipe 'mxfp8' with rules=[]; rank 1: recipe 'mxfp8' with rules=[" in rules
    assert "rank 0: recipe 'mxfp8' with gather_quantized_(recompute)=False; rank 1" in gathers


def test_a_rank_that_ends_or_hangs_ends_the_other(found):
    """By gloo's own error, after a compilation that waited for it in vain."""
    hung, lost = found[1]
    assert "imed out" in hung and "imed out" not in lost, found[1]
    for said in (hung, lost):
        assert said.startswith(("RuntimeError: ", "DistBackendError: ")) and "settings" not in said, said
