"""Random programs of the fuzzer on a GPU, a test each: `make gpu` names this file, which nothing else collects."""

import json
import re
import warnings

import pytest
import torch

from tests.fuzz.compare import Fuzzer
from tests.fuzz.programs import Style, build


def pytest_generate_tests(metafunc):
    """The programs that the run wants."""
    wanted = json.loads((metafunc.config.getoption("--gpu-run") / "wanted.json").read_text(encoding="utf-8"))
    seeds = [re.fullmatch(r".*::test_program\[(\d+)\]", name) for name in wanted]
    metafunc.parametrize("seed", [int(found[1]) for found in seeds if found])


@pytest.mark.gpu
def test_program(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of programs whose recipe leaves all alone
        finding = Fuzzer("cuda", inductor=True, dtype=torch.bfloat16).check(build(seed, Style(large=True)))
    if finding is not None:
        pytest.fail(str(finding), pytrace=False)
