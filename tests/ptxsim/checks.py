"""Which check of the simulator found a fault: its message tells."""

import re

_PLACE = r"^fault: \w+(, line (?P<line>\d+): .*?)?: "

# In this order: the first pattern that is in a message names the check.
_CHECKS = (
    ("unsupported", r"not simulated|does not know|only .* is supported|which this kind does not have"),
    ("deadlock", r"nothing can go on|does not end within|bytes never came"),
    ("unwritten read", "that nothing wrote"),
    ("proxy fence", r"without a fence\.proxy|tensor map without a wait|no fence\.proxy\.tensormap acquired"),
    ("race", r"may be reading|without a wait|without bar\.warp\.sync|without cp\.async|several threads (write|copy)|"
             r"another program|may arrive or wait|the program ends without|was overwritten after its release|in use"),
    ("outside or unaligned", r"outside of|no multiple of|not all multiples|not aligned|are not allocated|"
                             r"lanes begin at|from lane \d+ on"),
    ("mbarrier", r"mbarrier|arrives twice"),
    ("tensor map", r"tensor map|coordinate"),
    ("descriptor", r"descriptor|quarters of tensor memory hold|in a pattern of|UE4M3"),
    ("life of tensor memory", r"allocat|free"),
    ("threads of a warp", r"part of a warp|threads of a warp"),
)  # fmt: skip


def check_of(found: str) -> str:
    """The check that a line of `mutate.outcome` comes from. Raises ValueError for a message of none."""
    if not found.startswith("fault:"):
        return "wrong values"
    message = re.sub(_PLACE, "", found)
    for name, pattern in _CHECKS:
        if re.search(pattern, message):
            return name
    raise ValueError(f"no check says {found!r}")


def without_statement(found: str) -> str:
    """The line without the kernel's name and the statement of the PTX, and without the warps that executed it."""
    what = re.sub(_PLACE, lambda place: f"line {place['line']}: " if place["line"] else "", found)
    return re.sub(r" \(warps? [^()]*\)$", "", what)[:200]
