"""torch.compile without what no test reads: a sixth of a compilation, and two fifths of what the C++ compiler takes.

- pytest listens to loggers that do not pass their records on. torch's structured trace is one, and where anybody
  listens torch writes every step of every compilation as JSON.
- For every graph torch describes each part of the cache's key in text of its own, for a message of the level DEBUG.
- For every graph torch measures how long its guards take, and empties the processor's caches for that.
- The C++ compiler optimises loops over tensors of a few rows, and writes down their lines for debuggers.
"""

import logging


def leave_out_diagnostics() -> None:
    """Imports Inductor: not before the environment is what its configuration shall be."""
    logging.getLogger("torch.__trace").propagate = True
    leave_out_keys_and_times()


def leave_out_keys_and_times() -> None:
    """All but the first of these, for processes without pytest: there the trace would be printed."""
    from torch._dynamo import guards
    from torch._inductor import cpp_builder
    from torch._inductor.codecache import FxGraphCachePickler

    FxGraphCachePickler.debug_lines = lambda self, details: []  # type: ignore[method-assign]
    guards.profile_guard_manager = lambda *args: 0.0

    flags = cpp_builder._get_optimization_cflags

    def quick_flags(*args, **kwargs):
        compiling, linking = flags(*args, **kwargs)
        return ["O0" if flag == "O3" else flag for flag in compiling if flag != "g1"], linking

    cpp_builder._get_optimization_cflags = quick_flags
