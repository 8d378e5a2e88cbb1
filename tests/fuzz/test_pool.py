"""Random programs in several processes: what ends, hangs or loses the GPU, and what need not run again."""

import os
import time
from types import SimpleNamespace

import pytest

from tests.fuzz import pool


def pretend(pipe, options):
    """A process of the fuzzer whose seed 3 ends it, whose seed 5 hangs, and whose seed 7 loses the GPU."""
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        if seed == 3:
            os._exit(9)
        if seed == 5:
            time.sleep(100)
        time.sleep(0.01)
        finding = "numbers: wrong" if seed == 7 else None
        pipe.send((pool.Outcome(seed, finding, f"seed {seed}", 0.01, True), seed != 7))
        if seed == 7:
            os._exit(0)


@pytest.mark.slow
def test_every_program_has_one_outcome():
    found = list(pool.outcomes_of(range(12), SimpleNamespace(), 2, serve=pretend, stuck=4.0))
    assert sorted(outcome.seed for outcome in found) == list(range(12))
    wrong = {outcome.seed: outcome.finding for outcome in found if outcome.finding is not None}
    assert sorted(wrong) == [3, 5, 7]
    assert wrong[3] == "crash: the process ended with status 9"
    assert wrong[5] == "crash: stuck: no outcome after 4 s" and wrong[7] == "numbers: wrong"


def test_programs_are_recorded_and_not_run_again(tmp_path, monkeypatch, capsys):
    asked = []

    def outcomes(seeds, options, jobs):
        asked.append((list(seeds), jobs))
        yield from (pool.Outcome(seed, "numbers: x" if seed == 2 else None, "all of it", 1.0, True) for seed in seeds)

    monkeypatch.setattr(pool, "outcomes_of", outcomes)
    options = SimpleNamespace(records=tmp_path / "r.jsonl", seed=0, count=4, jobs=8, stop=99, json=False)
    assert pool.fuzz(options) == 1
    assert "all of it" in capsys.readouterr().out
    assert pool.fuzz(options) == 1
    assert asked == [([0, 1, 2, 3], 4), ([2], 1)]
