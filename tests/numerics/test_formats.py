"""The named formats: their fields, their text form, which formats go together, and what is refused."""

import contextlib
import dataclasses
import itertools
import pickle

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import NAMED, BlockFormat, compatible, get

# name -> spec, whether codes are packed, whether blocks are square
EXPECTED = {
    "nvfp4": ("e2m1:1x16:e4m3:tensor:torchao", True, False),
    "nvfp4_one_level": ("e2m1:1x16:e4m3:-:torchao", True, False),
    "nvfp4_te": ("e2m1:1x16:e4m3:tensor:te", True, False),
    "nvfp4_rowwise": ("e2m1:1x16:e4m3:row:te", True, False),
    "nvfp4_16x16": ("e2m1:16x16:e4m3:tensor:te", True, True),
    "mxfp8": ("e4m3:1x32:e8m0:-:rceil", False, False),
    "mxfp8_floor": ("e4m3:1x32:e8m0:-:floor", False, False),
    "mxfp8_ceil": ("e4m3:1x32:e8m0:-:ceil", False, False),
    "mxfp8_even": ("e4m3:1x32:e8m0:-:even", False, False),
    "mxfp8_e5m2": ("e5m2:1x32:e8m0:-:rceil", False, False),
    "mxfp8_32x32": ("e4m3:32x32:e8m0:-:rceil", False, True),
    "mxfp4": ("e2m1:1x32:e8m0:-:rceil", True, False),
    "mxfp4_even": ("e2m1:1x32:e8m0:-:even", True, False),
    "float8_1x128": ("e4m3:1x128:float32:-:torchao", False, False),
    "float8_128x128": ("e4m3:128x128:float32:-:torchao", False, True),
    "float8_rowwise": ("e4m3:-:-:row:torchao", False, False),
    "float8_tensor": ("e4m3:-:-:tensor:torchao", False, False),
}


def every_valid_format():
    for block in ((1, 16), (16, 16)):
        for outer in (None, "tensor"):
            yield BlockFormat("e2m1", block, "e4m3", outer, "te")
    yield BlockFormat("e2m1", (1, 16), "e4m3", "row", "te")
    yield BlockFormat("e2m1", (1, 16), "e4m3", None, "torchao")
    yield BlockFormat("e2m1", (1, 16), "e4m3", "tensor", "torchao")
    for element in ("e2m1", "e4m3", "e5m2"):
        for block in ((1, 32), (32, 32)):
            for mode in ("floor", "ceil", "even", "rceil"):
                yield BlockFormat(element, block, "e8m0", None, mode)
    for element, contract in itertools.product(("e4m3", "e5m2"), formats.FLOAT8_CONTRACTS):
        for outer in ("row", "tensor"):
            yield BlockFormat(element, None, None, outer, contract)
        for n in (32, 64, 128):
            for block in ((1, n), (n, n)):
                yield BlockFormat(element, block, "float32", None, contract)


def test_named_formats_are_the_documented_ones():
    assert set(NAMED) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_named_format(name):
    fmt = get(name)
    spec, packed, square = EXPECTED[name]
    assert fmt is NAMED[name]
    assert (fmt.name, fmt.spec) == (name, spec)
    assert (fmt.packed, fmt.square) == (packed, square)


def test_storage_types():
    assert (get("nvfp4").data_dtype, get("nvfp4").scale_dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert (get("mxfp4").data_dtype, get("mxfp4").scale_dtype) == (torch.uint8, torch.float8_e8m0fnu)
    assert (get("mxfp8").data_dtype, get("mxfp8").scale_dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert get("mxfp8_e5m2").data_dtype == torch.float8_e5m2
    assert (get("float8_rowwise").data_dtype, get("float8_rowwise").block_cols) == (torch.float8_e4m3fn, 1)
    assert [get(n).element_max for n in ("nvfp4", "mxfp8", "mxfp8_e5m2")] == [6.0, 448.0, 57344.0]


def test_spec_and_name_read_back_for_every_valid_format():
    all_formats = list(every_valid_format())
    assert len({fmt.spec for fmt in all_formats}) == len(all_formats) == 79
    for fmt in all_formats:
        assert get(fmt.spec) == get(fmt.name) == get(fmt) == fmt
        assert pickle.loads(pickle.dumps(fmt)) == fmt
        assert hash(get(fmt.spec)) == hash(fmt)


def test_a_format_without_a_registered_name_is_named_by_its_spec():
    fmt = BlockFormat("e5m2", (32, 32), "e8m0", None, "even")
    assert fmt.name == fmt.spec == "e5m2:32x32:e8m0:-:even"


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get("nvfp4").outer = None


NVFP4 = dict(element="e2m1", block=(1, 16), scale="e4m3", outer="tensor", contract="te")
MXFP8 = dict(element="e4m3", block=(1, 32), scale="e8m0", outer=None, contract="rceil")
ROWWISE = dict(element="e4m3", block=None, scale=None, outer="row", contract="torchao")
FLOAT8 = dict(element="e4m3", block=(1, 128), scale="float32", outer=None, contract="te")
BLOCKS = (None, *((rows, n) for n in (16, 32, 64, 128) for rows in (1, n)), (32, 1), (16, 1), (128, 64))
CONTRACTS = {*formats.NVFP4_CONTRACTS, *formats.MX_CONTRACTS, *formats.FLOAT8_CONTRACTS, "x"}

# Which argument the message names; that every other combination is refused is said below.
CONTRADICTIONS = [
    (NVFP4, dict(element="e3m2"), "element"), (NVFP4, dict(element="e4m3"), "element"),
    (NVFP4, dict(block=(1, 32)), "block"), (NVFP4, dict(block=None), "block"), (NVFP4, dict(outer="column"), "outer"),
    (NVFP4, dict(contract="rceil"), "contract"), (NVFP4, dict(block=(16, 16), outer="row"), "outer"),
    (NVFP4, dict(block=(16, 16), contract="torchao"), "contract"), (NVFP4, dict(scale="e8m0"), "block"),
    (NVFP4, dict(scale="e5m2"), "scale"), (MXFP8, dict(scale="e4m3"), "element"), (MXFP8, dict(block=(1, 16)), "block"),
    (MXFP8, dict(outer="tensor"), "outer"), (MXFP8, dict(contract="te"), "contract"),
    (ROWWISE, dict(element="e2m1"), "element"), (ROWWISE, dict(block=32), "block"),
    (ROWWISE, dict(outer=None), "outer"), (ROWWISE, dict(contract="rceil"), "contract"),
    (FLOAT8, dict(element="e2m1"), "element"), (FLOAT8, dict(block=(1, 16)), "block"),
    (FLOAT8, dict(block=None), "block"), (FLOAT8, dict(outer="tensor"), "outer"),
    (FLOAT8, dict(contract="rceil"), "contract"),
]  # fmt: skip


@pytest.mark.parametrize("base, change, argument", CONTRADICTIONS)
def test_contradiction(base, change, argument):
    with pytest.raises(ValueError, match=argument):
        BlockFormat(**(base | change))


def test_every_combination_is_either_one_of_the_valid_formats_or_refused():
    valid = set(every_valid_format())
    accepted = set()
    for element in (*formats.ELEMENT_MAX, "x"):
        for block in BLOCKS:
            for scale in (None, *formats.SCALE_DTYPE, "x"):
                for outer in (None, "tensor", "row", "x"):
                    for contract in CONTRACTS:
                        with contextlib.suppress(ValueError):
                            accepted.add(BlockFormat(element, block, scale, outer, contract))
    assert accepted == valid


@pytest.mark.parametrize(
    "name, nearest", [("nvfp4_onelevel", "nvfp4_one_level"), ("mxfp_8", "mxfp8"), ("NVFP4", "nvfp4"), ("int", None)]
)
def test_unknown_name_hints_at_the_nearest_and_lists_all(name, nearest):
    with pytest.raises(ValueError) as error:
        get(name)
    assert repr(name) in str(error.value)
    assert ("Did you mean" in str(error.value)) == (nearest is not None)
    assert nearest is None or f"Did you mean {nearest!r}?" in str(error.value)
    assert all(known in str(error.value) for known in NAMED)


@pytest.mark.parametrize("spec", ["e2m1:1x16:e4m3:tensor", "e2m1:1x16:e4m3:tensor:te:x", "", "e2m1:-1x16:e4m3:-:te"])
def test_malformed_spec(spec):
    with pytest.raises(ValueError, match="unknown format"):
        get(spec)


def test_a_spec_is_checked_like_any_format():
    with pytest.raises(ValueError, match="block"):
        get("e2m1:1x16:e8m0:-:rceil")


@pytest.mark.parametrize("wrong", [None, 4, torch.float8_e4m3fn, ("nvfp4",)])
def test_a_format_of_the_wrong_type(wrong):
    with pytest.raises(TypeError, match="format"):
        get(wrong)


def test_compatible():
    """Which pairs the matrix units multiply: all NVFP4, all MX, float8_rowwise; never across."""
    kinds = [
        [n for n in NAMED if n.startswith("nvfp4")],
        [n for n in NAMED if n.startswith("mx")],
        ["float8_rowwise", "float8_tensor"],
        ["float8_1x128", "float8_128x128"],
    ]
    assert sum(map(len, kinds)) == len(NAMED)
    for i, left in enumerate(kinds):
        for j, right in enumerate(kinds):
            assert {compatible(get(a), get(b)) for a in left for b in right} == {i == j}
