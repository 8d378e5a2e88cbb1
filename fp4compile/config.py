"""Settings of this process for debugging. They select the passes that run, and never change a recipe.

To bisect a wrong result, switch passes off one by one until the result is right:

    fp4compile.config.disabled_passes = ("fuse_epilogue", "inplace")     # before `fp4compile.backend(...)`

or, without a change to the program,

    FP4COMPILE_DISABLE_PASSES=fuse_epilogue,inplace python train.py

The names are `rewrite` (without it nothing is quantised), `recompute`, `hoist`, `merge_quantize`,
`quantize_before_gather`, `fake_quantize`, `quantize_before_index`, `fuse_quantize`, `fuse_epilogue`, `scale_results`,
`fuse_prologue`, `rank_tokens`, `fuse_horizontal`, `inplace` and `lower`. A pass that is named in either place is off.
With every pass but `rewrite` off, the graph runs the plain ops, one after another. `report.passes` lists the passes
that ran, how often each matched and how long it took. FP4COMPILE_DUMP=directory writes the graph before and after each
pass.

On several ranks, a compilation compares the recipe and these settings with the other ranks of each process group whose
collectives the graph may call, and raises RuntimeError where they differ. `agreement_seconds` is how long a rank waits
for the others, once for each recipe and group; 0 does not wait.

A backend reads the settings of passes when it is made, and keeps them. They are part of every cache key, so that a
graph compiled under other settings is never reused. A backend that is used by name (`backend="fp4compile_nvfp4"`) is
made at the first use of the name in the process; compiling with it under other settings raises RuntimeError.
"""

import os
from collections.abc import Collection

DISABLE = "FP4COMPILE_DISABLE_PASSES"

# Names of the passes that are switched off.
disabled_passes: Collection[str] = ()
# Seconds that a compilation waits for the recipes of the other ranks of a process group.
agreement_seconds: float = 60.0


def switched_off(allowed: Collection[str]) -> frozenset[str]:
    """The passes that `disabled_passes` and FP4COMPILE_DISABLE_PASSES name.

    allowed: names of the passes that can be switched off. Raises ValueError for any other name; TypeError if the
    setting is no collection of names.
    """
    if isinstance(disabled_passes, str) or not isinstance(disabled_passes, Collection):
        raise TypeError(
            "fp4compile.config.disabled_passes: expected a collection of names such as "
            f"{tuple(allowed)[-1:]}, got {disabled_passes!r}"
        )
    listed = [name.strip() for name in os.environ.get(DISABLE, "").split(",")]
    sources = {"fp4compile.config.disabled_passes": disabled_passes, DISABLE: [name for name in listed if name]}
    for source, names in sources.items():
        for name in names:
            if name not in allowed:
                raise ValueError(f"{source}: unknown pass {name!r}; allowed are {', '.join(allowed)}")
    return frozenset(name for names in sources.values() for name in names)
