"""torch.compile without what it does for its developers alone: no test reads it, and it is a sixth of a compilation.

- pytest listens to loggers that do not pass their records on. torch's structured trace is one, and where anybody
  listens torch writes every step of every compilation as JSON.
- For every graph torch describes each part of the cache's key in text of its own, for a message of the level DEBUG.
- For every graph torch measures how long its guards take, and empties the processor's caches for that.
"""

import logging


def leave_out_diagnostics() -> None:
    """Imports Inductor: not before the environment is what its configuration shall be."""
    logging.getLogger("torch.__trace").propagate = True
    leave_out_keys_and_times()


def leave_out_keys_and_times() -> None:
    """The second and the third of these, for processes without pytest: there the trace would be printed."""
    from torch._dynamo import guards
    from torch._inductor.codecache import FxGraphCachePickler

    FxGraphCachePickler.debug_lines = lambda self, details: []  # type: ignore[method-assign]
    guards.profile_guard_manager = lambda *args: 0.0
