"""Why edits are not found: most of these change nothing that anybody could see.

Numbers of statements belong to the PTX of the pinned version of Triton.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explained:
    """subject, kernel, edit: regular expressions that match the whole names.

    reason: why the simulator does not find the edits. equivalent: whether they change nothing.
    """

    subject: str
    kernel: str
    edit: str
    reason: str
    equivalent: bool = True

    def explains(self, subject: str, kernel: str, edit: str) -> bool:
        pairs = ((self.subject, subject), (self.kernel, kernel), (self.edit, edit))
        return all(re.fullmatch(pattern, name) for pattern, name in pairs)


EXPLAINED: tuple[Explained, ...] = ()


def explanation(subject: str, kernel: str, edit: str) -> Explained | None:
    """Why an edit is not found; None for one that is."""
    return next((one for one in EXPLAINED if one.explains(subject, kernel, edit)), None)
