"""Codes of shards, put together, are the codes of the whole weight, bit for bit."""

from functools import partial

import pytest
import torch

from fp4compile.distributed import compiled
from fp4compile.distributed.codes import Direction, magnitudes_of
from fp4compile.distributed.shard import encode
from fp4compile.formats import formats
from fp4compile.formats.layouts import scale_layout
from fp4compile.ops.quantize import QUANTIZE
from tests.helpers.gathered_codes import RANKS, K, N, gathered, weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(("name", "layout"), sorted(
    {(name, scale_layout(fmt, native=native)) for name, fmt in formats.NAMED.items() for native in (False, True)}
))  # fmt: skip
def test_shards_have_the_bits_of_the_whole_weight(name, layout, dim, device):
    fmt, whole = formats.get(name), weight(device)
    expected = QUANTIZE(whole, name, dim, layout=layout)
    found = gathered(Direction(name, dim, (N, K), layout), whole, whole.flip(0) * 50)
    assert [part is not None for part in found] == [True, fmt.scale is not None, fmt.outer is not None]
    for part, wanted in zip(found, expected, strict=True):
        if part is not None:
            assert part.dtype == wanted.dtype and part.shape == wanted.shape
            assert torch.equal(part.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))


def test_pieces_of_an_odd_number_of_bytes():
    """A rank has three blocks of each column."""
    whole = weight()[-144:]
    found, expected = gathered(Direction("nvfp4", -2, (144, K)), whole), QUANTIZE(whole, "nvfp4", -2)
    for part, wanted in zip(found, expected, strict=True):
        assert torch.equal(part.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name, fmt in formats.NAMED.items() if fmt.square])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_codes_of_square_blocks_are_transposed(name, layout, device):
    rows, columns = (Direction(name, dim, (N, K), layout) for dim in (-1, -2))
    codes, wanted_codes = (tuple(gathered(one, weight(device))) for one in (rows, columns))
    found = tuple(None if part is None else torch.empty_like(part) for part in wanted_codes)
    columns.transpose(codes, found)
    for part, wanted in zip(found, wanted_codes, strict=True):
        assert (part is None) == (wanted is None)
        assert part is None or torch.equal(part.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))


@pytest.mark.parametrize(("name", "ranks", "dim", "why"), [
    ("mxfp8", 5, -1, "its 192 rows do not divide evenly among 5 ranks"),
    ("mxfp8", 4, -2, "the 48 rows of a rank cut blocks of 32 rows (mxfp8)"),
    ("nvfp4_16x16", 8, -1, "the 24 rows of a rank cut blocks of 16 rows (nvfp4_16x16)"),
    ("mxfp8", 4, -1, None),
    ("nvfp4", 4, -2, None),
    ("float8_rowwise", 64, -2, None),
])  # fmt: skip
def test_shards_that_cut_a_block_are_named(name, ranks, dim, why):
    assert Direction(name, dim, (192, K)).misfit(ranks) == why


@pytest.mark.parametrize(("name", "fewer"), [("nvfp4", 3.5), ("mxfp8", 1.9), ("float8_rowwise", 1.9)])
@pytest.mark.parametrize("dim", [-1, -2])
def test_a_rank_sends_fewer_bytes(name, fewer, dim):
    size = (4096, 1024)
    places = Direction(name, dim, size).places(torch.device("meta"), 8)
    sent = sum(place.arriving.numel() for place in places if place is not None)
    assert 2 * size[0] * size[1] / sent > fewer


@pytest.mark.parametrize("device", DEVICES)
def test_magnitudes_have_no_sign_and_keep_nan(device):
    """Ranks compare them as integers."""
    kinds = Direction("nvfp4", -1, (N, K)), Direction("float8_rowwise", -2, (N, K))
    stack = torch.ones(3, N, K, dtype=torch.bfloat16, device=device)
    stack[0, 5, 7], stack[1, 2, 3], stack[2, 0, 0] = -torch.tensor(torch.nan), -torch.inf, -3
    of_weights, of_columns = (found.view(torch.int32) for found in magnitudes_of([(kind, stack) for kind in kinds]))
    nan, inf, three, one = (torch.tensor(each).view(torch.int32).item() for each in (torch.nan, torch.inf, 3.0, 1.0))
    assert of_weights.shape == (3, 1) and of_columns.shape == (3, K)
    assert of_weights[0] >= nan > inf == of_weights[1] and of_weights[2] == three
    assert of_columns[0, 7] >= nan and of_columns[1, 3] == inf and of_columns[2, 0] == three
    assert of_columns.eq(one).sum() == 3 * K - 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", formats.NAMED)
def test_compiled_codes_have_the_same_bits(name):
    """As in tests/ptxsim/test_compiled_models.py."""
    both = tuple(Direction(name, dim, (N, K)) for dim in (-1, -2))
    sent = both, both[:1]
    whole = weight("cuda")
    stacks = torch.stack([whole, whole.flip(0)]), whole[: N // RANKS].unsqueeze(0)
    tensors = []
    for stack, directions in zip(stacks, sent, strict=True):
        tensors += [stack, *(magnitudes_of([(one, stack)])[0] for one in directions if one.scale_over_ranks)]
    found, expected = compiled.compiled(partial(encode, sent), tensors)(*tensors), encode(sent, *tensors)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
