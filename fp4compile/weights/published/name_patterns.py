"""Regular expressions of a checkpoint, matched by `re` if the number of its backtracking steps is bounded."""

import math
import re
from collections.abc import Callable
from functools import lru_cache
from re import _compiler, _parser  # type: ignore[attr-defined]
from re import _constants as codes  # type: ignore[attr-defined]
from typing import Any

_LONGEST = 10**4  # characters
_MOST_WAYS = 10**7  # ways through a pattern and a name, some tenths of a second
_ONE_CHARACTER = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


@lru_cache(maxsize=1024)
def name_pattern(pattern: str) -> Callable[[str], bool]:
    """A function that returns whether a pattern matches the beginning of a name, as `re.match` does.

    It raises ValueError where repeats and alternatives leave so many ways through a name that the matcher might not
    end. Raises ValueError for a pattern that is no regular expression, or a very long one.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"regular expression {pattern[:200]!r}...: expected at most {_LONGEST} characters")
    try:
        tree = _parser.parse(pattern)
        compiled, (alternatives, repeats) = _compiler.compile(tree), _ways(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regular expression {pattern[:200]!r} is none: {error}") from None

    def matches(name: str) -> bool:
        ways = math.inf if repeats == math.inf else math.log10(math.comb(len(name) + int(repeats), int(repeats)))
        if alternatives + ways > math.log10(_MOST_WAYS):
            raise ValueError(f"regular expression {pattern[:200]!r}: it takes too long to match; expected fewer "
                             "repeats and alternatives, and none inside a repeat without an end")  # fmt: skip
        return compiled.match(name) is not None

    return matches


def _ways(tree: Any) -> tuple[float, float]:
    """The decimal logarithm of the number of alternatives in a pattern's tree, and the number of unbounded repeats.

    k unbounded repeats cut n characters in at most (n + k over k) ways.
    """
    alternatives, repeats = 0.0, 0.0
    for op, argument in tree:
        more, inner = 0.0, (0.0, 0.0)
        if op is codes.BRANCH:
            each = [_ways(branch) for branch in argument[1]]
            inner = max(one for one, _ in each), max(one for _, one in each)
            more = math.log10(len(each))
        elif op in _REPEATS:
            low, high, body = argument
            inner, more = _ways(body), math.log10(min(high, 10**6) - low + 1)
            if high is codes.MAXREPEAT:
                simple = len(body) == 1 and body[0][0] in _ONE_CHARACTER
                inner, more = (0.0, 1.0 if simple else math.inf), 0.0
            else:
                inner = (high * inner[0], high * inner[1]) if any(inner) and high else (0.0, 0.0)
        elif op not in (*_ONE_CHARACTER, codes.AT, codes.GROUPREF, codes.FAILURE):
            parts = argument if isinstance(argument, tuple) else (argument,)
            for part in parts:
                if isinstance(part, _parser.SubPattern):
                    one, other = _ways(part)
                    inner = inner[0] + one, inner[1] + other
        alternatives, repeats = alternatives + more + inner[0], repeats + inner[1]
    return alternatives, repeats
