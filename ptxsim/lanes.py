"""The order of accesses to shared memory by the threads of one warp, which need not run in step.

Source: PTX ISA, "bar.warp.sync": it "guarantees memory ordering among participating threads"; `shfl.sync` and its kin
do not. So what one thread writes, or copies by `cp.async` and waits for, another thread of its warp may read after both
have met: at `bar.warp.sync`, at a barrier of the program or the cluster, or at an mbarrier. Confidence high.

Not checked: accesses that another thread of the warp releases by an arrival, or orders before an asynchronous
operation. A meeting of a part of a warp counts for all of it.
"""

import numpy as np

from ptxsim.fault import Fault

COLLECTIVE = 32  # the lane of an access that a warp makes as one
_SEVERAL = 33  # and of reads of one cell by several threads
_ANY = 34  # and of writes of one value to a cell by several threads
_BITS = 6


class Lanes:
    """The last write to each cell and the last reads by each warp: by which lane, and between which meetings.

    A record is the number of the warp's last meeting, times 64, plus the lane; of a cell that `cp.async` wrote, -1 less
    the lane. meetings: of each warp so far. waited: of each warp, the group of `cp.async` whose end all of its threads
    know.
    """

    def __init__(self, cells: int, clusters: int, warps: int) -> None:
        self.meetings = np.ones((clusters, warps), np.int32)
        self.waited = np.zeros((clusters, warps), np.int32)
        self._wrote = np.zeros(cells, np.int32)
        self._read = np.zeros((warps, cells), np.int32)

    def meet(self, clusters: np.ndarray | int, warps: np.ndarray | list[int], waited: np.ndarray) -> None:
        """The threads of each of some warps meet. waited: the groups of `cp.async` that they have waited for."""
        self.meetings[clusters, warps] += 1
        self.waited[clusters, warps] = waited

    def reads(
        self, cells: np.ndarray, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray,
        is_own: np.ndarray, groups: np.ndarray,
    ) -> None:  # fmt: skip
        """Threads read cells [threads, n]. clusters, warps, lanes: [threads], of the threads.

        is_own: bool [threads, n], whether the thread's warp or its copies wrote a cell. groups: of the copies that did.
        """
        now, mine = self.meetings[clusters, warps][:, None], lanes[:, None]
        wrote = self._wrote[cells]
        if (late := wrote >> _BITS == now).any() and (late & is_own & _others(wrote, mine)).any():
            raise Fault("reads shared memory that another thread of its warp wrote, without bar.warp.sync")
        if (copied := wrote < 0).any():
            copied &= is_own & (-1 - wrote != mine) & (groups > self.waited[clusters, warps][:, None])
            if copied.any():
                raise Fault("reads shared memory that cp.async of another thread of its warp wrote, without "
                            "bar.warp.sync after that thread's wait")  # fmt: skip
        record, warps = now << _BITS | mine, warps[:, None]
        before = self._read[warps, cells]
        self._read[warps, cells] = record
        several = (before >> _BITS == now) & (before != record) | (self._read[warps, cells] != record)
        if several.any():
            at = np.nonzero(several)
            self._read[warps[at[0], 0], cells[at]] = now[at[0], 0] << _BITS | _SEVERAL

    def writes(
        self, cells: np.ndarray, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray,
        is_own: np.ndarray, changes: np.ndarray,
    ) -> None:  # fmt: skip
        """Threads write cells; arguments as of `reads`. changes: whether a cell gets another value."""
        now, mine = self.meetings[clusters, warps][:, None], lanes[:, None]
        self._check_readers(cells, warps, now, mine)
        wrote = self._wrote[cells]
        if (late := wrote >> _BITS == now).any() and (late & is_own & changes & _others(wrote, mine)).any():
            raise Fault("overwrites shared memory that another thread of its warp wrote, without bar.warp.sync")
        record = now << _BITS | mine
        self._wrote[cells] = record
        if (again := self._wrote[cells] != record).any():
            self._wrote[cells[again]] = (now + np.zeros_like(cells))[again] << _BITS | _ANY

    def copies(
        self, cells: np.ndarray, warps: np.ndarray, lanes: np.ndarray, issued: np.ndarray
    ) -> None:  # fmt: skip
        """`cp.async` of threads write cells. issued: [threads], the number of the warp's last meeting at the issue."""
        self._check_readers(cells, warps, issued[:, None], lanes[:, None])
        self._wrote[cells] = -1 - lanes[:, None]

    def _check_readers(self, cells: np.ndarray, warps: np.ndarray, since: np.ndarray, mine: np.ndarray) -> None:
        read = self._read[warps[:, None], cells]
        if (late := read >> _BITS >= since).any() and (late & _others(read, mine)).any():
            raise Fault("overwrites shared memory that another thread of its warp may be reading, without "
                        "bar.warp.sync")  # fmt: skip


def _others(records: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Whether the access of a record was another thread's than mine."""
    lanes = records & (1 << _BITS) - 1
    return ((lanes != mine) | (lanes == COLLECTIVE)) & (lanes != _ANY)
