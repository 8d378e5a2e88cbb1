"""Random programs, a fixed seed: see `python -m tests.fuzz` for more of them."""

import warnings
from unittest.mock import Mock

import pytest
import torch

from tests.fuzz import compare
from tests.fuzz.compare import Fuzzer
from tests.fuzz.programs import Style, build

# Those of the first 300 that together have nearly every line of code that steps can have, every format and every action
# of a rule; 97 and 226 have a weight on the left in another format than the activation.
CHOSEN = (
    3, 14, 17, 18, 21, 24, 26, 35, 37, 38, 51, 52, 55, 59, 64, 68, 70, 74, 82, 86, 97, 98, 101, 111, 117, 120, 122,
    129, 139, 140, 151, 158, 159, 161, 164, 165, 186, 188, 195, 198, 200, 202, 204, 213, 224, 226, 228, 229, 238, 262,
    263, 276,
)  # fmt: skip
PARTS = 2


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_random_programs(part):
    fuzzer = Fuzzer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of programs whose recipe leaves all alone
        for seed in CHOSEN[part::PARTS]:
            finding = fuzzer.check(build(seed))
            if finding is not None:
                pytest.fail(str(finding), pytrace=False)
    # Tolerance is for the few that round in another order.
    assert fuzzer.exact >= 0.9 * fuzzer.run


def test_a_seed_is_a_program():
    assert build(7) == build(7)
    assert build(7) != build(8)


def test_values_are_halved_until_nothing_overflows():
    """Attention without a softmax, whose results are its next operands: 97 % of what it computes is infinite or NaN."""
    program = build(880120, Style(large=True))
    module, _, outside = program.load()
    modules = torch.nn.ModuleList([module, *outside]).to(torch.bfloat16)
    values = compare.fill(modules, program, "normal", "cpu", torch.bfloat16, None)
    before = values[0].clone()

    def finite():
        results = compare.results_of(module, program, values, modules)
        return all(each is None or each.isfinite().all() for each in results)

    assert not finite()
    compare.halve_until_finite(module, program, [values], modules)
    halvings = (before / values[0]).nanmedian().log2()
    assert finite() and halvings == halvings.round() and halvings > 0


def test_equal_values_are_right_where_noise_leads_to_nan(monkeypatch):
    """Another output differs, within what the noise allows; a NaN of the oracle under noise allows no other number."""
    expected = [torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, 4.0])]
    shaken = [torch.tensor([1.0, 2.1]), torch.tensor([torch.inf, torch.nan])]
    monkeypatch.setattr(compare, "results_of", lambda *_: shaken)
    program = build(7)
    program = Mock(wraps=program, train=False, recipe=program.recipe, dynamic=False, outputs=lambda: ["x", "y"])

    def difference(*got):
        return Fuzzer()._difference(program, Mock(), None, None, None, [], got, expected)

    near = torch.tensor([1.0, 2.05])
    assert difference(near, expected[1].clone()) is None
    assert difference(torch.tensor([1.0, 3.0]), expected[1]).startswith("x: relative error")
    assert difference(near, torch.tensor([torch.nan, 5.0])).startswith("y: relative error")
