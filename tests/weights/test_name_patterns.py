"""Regular expressions of checkpoints: the answers are those of `re.match`, and they come at once."""

import random
import re
import time

import pytest

from fp4compile.weights.published.name_patterns import name_pattern

REFUSED_PATTERNS = (
    "[", "(", "*", "a**", "(?P<n", "a{2,1}", "a{99999999999999999999}", "(" * 5000, "(?:" * 2000 + ")*" * 2000,
    r"(\w)\1", "(?i)linear", "(?>a)b", "a*+b", "(?<=a+)b", "(?(1)a|b)", "\\", "a" * 20_000,
    "(?:a{1,9}b?" * 40 + "){1,9}" * 40 + "!",
)  # fmt: skip
# These match no layer, and `re.match` would not say so for years.
SLOW_PATTERNS = (
    r"(\w+)+!", r"(\w*)*!", r"(\w|\d|.)*!", r"(.*)*!", r"((\w+.?)+)+!", r"(\w+\w+)+!", r"(.*.*)*(.*.*)*!",
    r"(?=(\w+)+!).*", r"(?:.?){60}" * 20 + "!", r"(\w?\w?)*!", r".*" * 200 + "!", r"(?:(?:\w+.)+\w+.?)+!",
)  # fmt: skip
SECONDS = 5  # for a name and all patterns; the slowest takes tenths of a second
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
    "a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "[a-c0]", "1", r"\W", r"\s", r"\S", r"\D", r"[\d.]", r"[^\w]",
    "\n",
)  # fmt: skip
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
    draw, counts = random.Random(0), [0, 0, 0]
    for _ in range(6000):
        pattern, name = random_pattern(draw, 4), "".join(draw.choices("ab.1 \n", k=draw.randint(1, 8)))
        expected = re.match(pattern, name) is not None
        try:
            assert name_pattern(pattern)(name) == expected, (pattern, name)
            counts[expected] += 1
        except ValueError:  # a repeat of a group without an end
            counts[2] += 1
    assert min(counts[:2]) > 1000 and counts[2] < 2000


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.11.gate_proj" * 2, "a" * 60, "a" * 9000, "a.b" * 3000])
def test_no_pattern_takes_long(name):
    """Either an answer or an error: the patterns for which `re.match` needs years are refused."""
    start = time.process_time()
    for pattern in (*SLOW_PATTERNS, *REFUSED_PATTERNS):
        try:
            assert name_pattern(pattern)(name) in (True, False)
            assert pattern not in SLOW_PATTERNS
        except ValueError as error:
            assert pattern[:20] in str(error).replace(r"\\", "\\") and "expression" in str(error)
    assert time.process_time() - start < SECONDS


@pytest.mark.parametrize(("pattern", "name", "answered"), [
    (".*" * 5 + "!", "a" * 60, True), (".*" * 6 + "!", "a" * 60, False), (".*" * 3 + "!", "a" * 1000, False),
    ("(?:a|b)?" * 10 + "c", "a" * 60, True), ("(?:a|b)?" * 30 + "c", "a" * 60, False),
    ("(?:a{0,9}){2}c", "a" * 60, True), ("(?:a{0,9}){9}c", "a" * 60, False), ("(?:a*){0}c", "c", True),
])  # fmt: skip
def test_repeats_and_alternatives_are_counted(pattern, name, answered):
    if answered:
        assert name_pattern(pattern)(name) == (re.match(pattern, name) is not None)
        return
    with pytest.raises(ValueError, match="too long to match"):
        name_pattern(pattern)(name)


@pytest.mark.parametrize("pattern, reason", [
    ("[", "unterminated character set"), ("a{99999999999999999999}", "too large"), ("(" * 5000, "recursion"),
])  # fmt: skip
def test_what_is_refused_and_why(pattern, reason):
    with pytest.raises(ValueError, match=rf"regular expression .*{reason}"):
        name_pattern(pattern)
