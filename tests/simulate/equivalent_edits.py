"""Edits that are not found because nothing can find them: what they change has no effect, and why.

Numbers of statements belong to the PTX of the pinned version of Triton.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """subject, kernel, edit: regular expressions that match the whole names. reason: why the edit changes nothing."""

    subject: str
    kernel: str
    edit: str
    reason: str


EQUIVALENT: tuple[Equivalent, ...] = ()


def reason(subject: str, kernel: str, edit: str) -> str | None:
    """Why an edit changes nothing; None where it should be found."""
    for one in EQUIVALENT:
        if all(re.fullmatch(pattern, name) for pattern, name in
               ((one.subject, subject), (one.kernel, kernel), (one.edit, edit))):  # fmt: skip
            return one.reason
    return None
