"""Regular expressions that come with a checkpoint, matched in bounded time.

The matcher of `re` backtracks, without end for a pattern such as `(\\w+)+!`. This matcher captures no groups, so it can
use sets: from all positions at which a part of a pattern may begin, it computes all positions at which the part may
end. A set of positions is an integer; bit i stands for the position before character i. Remaining growth, such as
repeats of repeats, is cut off at a number of steps that no pattern for names needs.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_LONGEST = 10_000  # characters of a pattern, and of a name
_MOST_STEPS = 10_000  # for one name; a step looks up a character, or goes once through an operator


@lru_cache(maxsize=1024)
def name_pattern(pattern: str) -> Callable[[str], bool]:
    """A function that returns whether a pattern matches the beginning of a name, as `re.match` does.

    The function raises ValueError for a name of more than 10,000 characters, and where the pattern takes too many
    steps for a name.

    Raises ValueError for a pattern that is no regular expression, is longer than 10,000 characters, or has flags, back
    references, atomic groups or possessive repeats.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"regular expression {pattern[:40]!r}...: expected at most {_LONGEST} characters, got "
                         f"{len(pattern)}")  # fmt: skip
    try:
        re.compile(pattern)
        parsed = _parser.parse(pattern)
        _check(parsed.data, parsed.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"regular expression {pattern!r} is none: {error}") from None
    except _UnknownError as error:
        raise ValueError(f"regular expression {pattern!r}: {error}") from None

    def matches(name: str) -> bool:
        if len(name) > _LONGEST:
            raise ValueError(f"name {name[:40]!r}...: expected at most {_LONGEST} characters, got {len(name)}")
        try:
            return _Match(name).ends(parsed.data, 1) != 0
        except (_UnknownError, RecursionError) as error:
            raise ValueError(f"regular expression {pattern!r}: {error}") from None

    return matches


class _UnknownError(Exception):
    """A feature of regular expressions that this matcher lacks."""


def _check(nodes: Any, flags: int) -> None:
    """Raise where the tree of a pattern has an operator that `_Match` lacks."""
    if flags & ~re.UNICODE.value:
        raise _UnknownError("expected no flags such as (?i)")
    for op, argument in nodes:
        if op not in _STEPS:
            raise _UnknownError(f"expected no {str(op).lower()}")
        if op is codes.SUBPATTERN:
            _check((), argument[1] | argument[2])
        for inner in _inner(argument):
            _check(inner.data, 0)


def _inner(argument: Any) -> Iterator[Any]:
    """The trees directly below an operator, by its argument."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _inner(part)


class _Match:
    """Where the parts of patterns may end in a name."""

    def __init__(self, name: str):
        self.length = len(name)
        self.steps = 0
        self.at: dict[str, int] = {}  # the positions of each character
        for i, character in enumerate(name):
            self.at[character] = self.at.get(character, 0) | 1 << i

    def ends(self, nodes: Any, starts: int) -> int:
        """The positions at which a sequence that begins at one of `starts` may end."""
        for op, argument in nodes:
            if not starts:
                break
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise _UnknownError("it takes too long to match; expected one with fewer repeats inside repeats")
            starts = _STEPS[op](self, argument, starts)
        return starts

    # ------------------------------------------------------------ characters

    def characters(self, item: tuple[Any, Any]) -> int:
        """The positions of all characters that match a literal, a set or another class of one character."""
        op, argument = item
        if op is codes.LITERAL:
            return self.at.get(chr(argument), 0)
        if op is codes.IN:
            negated = argument[0][0] is codes.NEGATE
            found = self._where(lambda c: any(_in(c, one) for one in argument[negated:]))
            return self._all & ~found if negated else found
        unwanted = "\n" if op is codes.ANY else chr(argument)
        return self._all & ~self.at.get(unwanted, 0)

    def _where(self, wanted: Callable[[str], bool]) -> int:
        return _union(positions for character, positions in self.at.items() if wanted(character))

    @property
    def _all(self) -> int:
        """The positions of all characters, without the end of the name."""
        return (1 << self.length) - 1

    # ------------------------------------------------------------ operators

    def branch(self, argument: Any, starts: int) -> int:
        return _union(self.ends(branch.data, starts) for branch in argument[1])

    def group(self, argument: Any, starts: int) -> int:
        return self.ends(argument[3].data, starts)

    def repeat(self, argument: Any, starts: int) -> int:
        low, high, body = argument
        one = body.data[0] if len(body.data) == 1 else None
        if one is not None and (low, high) in _UNBOUNDED and one[0] in _CHARACTERS:
            positions = self.characters(one)
            return self._run(positions, starts if low == 0 else (starts & positions) << 1)
        for _ in range(low):
            after = self.ends(body.data, starts)
            if after == starts:  # more repeats change nothing
                break
            starts = after
        reached = new = starts
        for _ in range(high - low):
            new = self.ends(body.data, new) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def _run(self, positions: int, starts: int) -> int:
        """The positions that are reached from `starts` through any number of characters at `positions`."""
        length = 1
        while positions:  # of runs of `length` characters
            starts |= (starts & positions) << length
            positions &= positions >> length
            length *= 2
        return starts

    def place(self, place: Any, starts: int) -> int:
        """The positions of `starts` that match `^`, `$`, `\\b` and the like."""
        end = 1 << self.length
        if place in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return starts & 1
        if place is codes.AT_END_STRING:
            return starts & end
        if place is codes.AT_END:
            return starts & (end | end >> 1 & self.at.get("\n", 0))
        words = self._where(lambda c: _in(c, (codes.CATEGORY, codes.CATEGORY_WORD)))
        edges = (words ^ words << 1) & (2 * end - 1)
        return starts & (edges if place is codes.AT_BOUNDARY else ~edges)

    def look(self, argument: Any, starts: int) -> int:
        """The positions of `starts` that match a lookahead or a lookbehind."""
        direction, body = argument
        back = body.getwidth()[0] if direction < 0 else 0
        found = 0
        for position in _positions(starts):
            there = self.ends(body.data, 1 << position - back) if position >= back else 0
            if there & 1 << position if direction < 0 else there:
                found |= 1 << position
        return found


def _one_character(op: Any, match: _Match, argument: Any, starts: int) -> int:
    return (starts & match.characters((op, argument))) << 1


_CHARACTERS = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
_STEPS: dict[Any, Callable[[_Match, Any, int], int]] = {
    **{op: partial(_one_character, op) for op in _CHARACTERS},
    codes.BRANCH: _Match.branch,
    codes.SUBPATTERN: _Match.group,
    codes.MAX_REPEAT: _Match.repeat,
    codes.MIN_REPEAT: _Match.repeat,
    codes.AT: _Match.place,
    codes.ASSERT: _Match.look,
    codes.ASSERT_NOT: lambda match, argument, starts: starts & ~match.look(argument, starts),
    codes.FAILURE: lambda match, argument, starts: 0,
}
_UNBOUNDED = ((0, codes.MAXREPEAT), (1, codes.MAXREPEAT))
_CATEGORIES = {
    codes.CATEGORY_DIGIT: re.compile(r"\d"),
    codes.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    codes.CATEGORY_SPACE: re.compile(r"\s"),
    codes.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    codes.CATEGORY_WORD: re.compile(r"\w"),
    codes.CATEGORY_NOT_WORD: re.compile(r"\W"),
}


def _in(character: str, item: tuple[Any, Any]) -> bool:
    """Whether a character is in a part of a set."""
    op, argument = item
    if op is codes.CATEGORY:
        return _CATEGORIES[argument].match(character) is not None
    first, last = argument if op is codes.RANGE else (argument, argument)
    return first <= ord(character) <= last


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


def _positions(positions: int) -> Iterator[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest
