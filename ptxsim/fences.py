"""Fences between accesses of threads, `fence.acq_rel` and `fence.sc`, and the relaxed operations that they order.

Source: PTX ISA, "Release and acquire patterns": a fence followed by a relaxed operation that others see releases, and a
relaxed operation that sees one, followed by a fence, acquires; each for the threads of the fence's scope. Confidence
high. `fence.mbarrier_init.release.cluster` orders initialisations of mbarriers only; here it counts as a fence of the
cluster for everything, which accepts more.
"""

import numpy as np

from ptxsim.clocks import KNOWN, SENT, Clocks

SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 2}


class Fences:
    """What the fences of each warp release, and what they will acquire. Warps are given by cluster and index in it."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self._released: dict[tuple[int, int, int], np.ndarray] = {}  # by cluster, warp and scope
        self._observed: dict[tuple[int, int, int], np.ndarray] = {}

    def fence(self, cluster: int, warp: int, scope: int) -> np.ndarray:
        """Execute a fence of a scope; returns the clocks that it releases."""
        for each in range(scope + 1):
            if (observed := self._observed.pop((cluster, warp, each), None)) is not None:
                self.clocks.acquire(cluster, warp, observed)
        rows = self.clocks.release(cluster, warp)
        self._released |= {(cluster, warp, each): rows for each in range(scope + 1)}
        return rows

    def released(self, cluster: int, warp: int, scope: int) -> np.ndarray:
        """The clocks that a relaxed operation of a warp passes on to threads of a scope: its clocks at its last fence.

        The order of `tcgen05.fence` travels with every operation.
        """
        rows = np.zeros_like(self.clocks.of(cluster, warp))
        if (found := self._released.get((cluster, warp, scope))) is not None:
            rows = found.copy()
        rows[SENT:] = self.clocks.rows[SENT:, cluster, warp]
        return rows

    def observe(self, cluster: int, warp: int, scope: int, rows: np.ndarray) -> None:
        """Record that a relaxed operation of a warp sees clocks which a later fence of the scope acquires."""
        sent = rows.copy()
        sent[KNOWN:SENT] = 0
        self.clocks.acquire(cluster, warp, sent)
        before = self._observed.get((cluster, warp, scope))
        self._observed[cluster, warp, scope] = rows if before is None else np.maximum(before, rows)
