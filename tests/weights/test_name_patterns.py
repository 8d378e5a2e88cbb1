"""Regular expressions of checkpoints: the answers are those of `re.match`, and they come at once."""

import random
import re

import pytest

from fp4compile.weights.published.name_patterns import name_pattern
from tests.helpers.hostile_files import REFUSED_PATTERNS, SLOW_PATTERNS
from tests.helpers.work import at_most

MOST_CALLS = 300_000  # of functions, for a pattern and a name; the slowest takes 140,000
NAMES = (
    "lm_head", "model.lm_head", "model.layers.11.self_attn.q_proj", "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate_proj", "model.layers.3.mlp.experts.127.down_proj", "visual.blocks.0.attn.proj", "x", "",
)  # fmt: skip
PATTERNS = (
    ".*lm_head", r".*mlp\.gate$", r"model\.layers\.\d+\.(q|k|v)_proj", r"model\.layers\.\d+\.self_attn\.(q|o)_proj$",
    "^(?!.*self_attn).*$", r".*\.experts\.\d+\.(?:gate|up|down)_proj", "visual.*", r"(?=.*mlp)(?!.*gate$).*",
    ".*(?<!gate)$",
    r"model\.layers\.(?:[0-9]|1[0-5])\..*", r".*\bmlp\b.*", r"[^.]+$", r".*?proj\Z", "", "x|y", "lm_head|.*gate_proj",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_configurations(pattern):
    matches = name_pattern(pattern)
    assert [matches(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]


ATOMS = (
    "a",
    "b",
    ".",
    r"\.",
    "[ab]",
    "[^a]",
    r"\w",
    r"\d",
    "[a-c0]",
    "1",
    r"\W",
    r"\s",
    r"\S",
    r"\D",
    r"[\d.]",
    r"[^\w]",
    "\n",
)
REPEATS = ("*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{0,3}?", "{2,}", "{0}")
PLACES = ("^", "$", r"\b", r"\B", r"\Z", r"\A", "(?!)", "()")


def random_pattern(draw, depth):
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return draw.choice(ATOMS)
    inner = [random_pattern(draw, depth - 1) for _ in range(2)]
    if kind < 0.5:
        return inner[0] + inner[1]
    if kind < 0.65:
        return f"({draw.choice(('', '?:'))}{inner[0]}|{inner[1]})"
    if kind < 0.85:
        return f"(?:{inner[0]}){draw.choice(REPEATS)}"
    if kind < 0.9:
        return f"({draw.choice(('?=', '?!'))}{inner[0]})"
    if kind < 0.95:
        return f"({draw.choice(('?<=', '?<!'))}{draw.choice(ATOMS)}{draw.choice(('', 'a', '.'))})"
    return draw.choice(PLACES)


def test_random_patterns():
    draw, counts = random.Random(0), [0, 0]
    for _ in range(6000):
        pattern, name = random_pattern(draw, 4), "".join(draw.choices("ab.1 \n", k=draw.randint(1, 8)))
        expected = re.match(pattern, name) is not None
        assert name_pattern(pattern)(name) == expected, (pattern, name)
        counts[expected] += 1
    assert min(counts) > 1000


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.11.gate_proj" * 2, "a" * 60, "a" * 9000, "a.b" * 3000])
def test_no_pattern_takes_long(name):
    """Either an answer, which is that nothing matches, or an error."""
    for pattern in (*SLOW_PATTERNS, *REFUSED_PATTERNS):
        with at_most(MOST_CALLS):
            try:
                assert not name_pattern(pattern)(name)
            except ValueError as error:
                assert pattern[:20] in str(error).replace(r"\\", "\\") and "expression" in str(error)


def test_slow_patterns_are_answered_for_names_of_usual_length():
    answered = 0
    for pattern in SLOW_PATTERNS:
        try:
            answered += not name_pattern(pattern)("model.layers.0.mlp.experts.11.gate_proj")
        except ValueError:
            continue
    assert answered >= len(SLOW_PATTERNS) - 1


@pytest.mark.parametrize("pattern, reason", [
    ("[", "unterminated character set"), (r"(a)\1", "expected no groupref"), ("(?i)a", "expected no flags"),
    ("(?i:a)", "expected no flags"), ("(?>a)", "expected no atomic_group"), ("a*+", "expected no possessive_repeat"),
    ("a" * 10_001, "expected at most 10000 characters, got 10001"), ("a{99999999999999999999}", "too large"),
    ("(" * 5000, "recursion"),
])  # fmt: skip
def test_what_is_refused_and_why(pattern, reason):
    with pytest.raises(ValueError, match=rf"regular expression .*{reason}"):
        name_pattern(pattern)


def test_long_names_are_refused():
    with pytest.raises(ValueError, match="name 'aaa.*at most 10000 characters, got 10001"):
        name_pattern("a*")("a" * 10_001)
