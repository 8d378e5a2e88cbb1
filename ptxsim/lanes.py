"""The order of accesses to shared memory by the threads of one warp, which need not run in lockstep.

Source: PTX ISA, "bar.warp.sync": it "guarantees memory ordering among participating threads"; `shfl.sync` and similar
instructions do not. So bytes that one thread writes, or copies by `cp.async` and waits for, may be read by others of
its warp after a meeting: at `bar.warp.sync`, a barrier of the program or the cluster, or an mbarrier. Confidence high.

Not checked: accesses that another thread of the warp releases by an arrival, or orders before an asynchronous
operation. A meeting of a part of a warp counts for all of it.
"""

from collections.abc import Callable

import numpy as np

from ptxsim.fault import Fault

COLLECTIVE = 32  # the lane of a collective access of a warp
_SEVERAL = 33  # and of reads of one cell by several threads
_ANY = 34  # and of writes of one value to a cell by several threads
_BITS = 6


class Lanes:
    """The lane and the last meeting before it of the last write to each cell and of the last reads by each warp.

    A record is the number of the warp's last meeting, times 64, plus the lane; for a cell that `cp.async` wrote, -1
    less the lane. meetings: of each warp so far. waited: for each warp, the group of `cp.async` for which all of its
    threads have waited.
    """

    def __init__(self, cells: int, clusters: int, warps: int) -> None:
        self.meetings = np.ones((clusters, warps), np.int32)
        self.waited = np.zeros((clusters, warps), np.int32)
        self._wrote = np.zeros(cells, np.int32)
        self._read = np.zeros(warps * cells, np.int32)  # of each cell's warps

    def meet(self, clusters: np.ndarray | int, warps: np.ndarray | list[int], waited: np.ndarray) -> None:
        """Record a meeting of the threads of each warp. waited: the groups of `cp.async` for which they have waited."""
        self.meetings[clusters, warps] += 1
        self.waited[clusters, warps] = waited

    def reads(
        self, cells: np.ndarray, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray,
        is_own: Callable[[], np.ndarray], written: np.ndarray,
    ) -> None:  # fmt: skip
        """Record that threads read cells [threads, n]. clusters, warps, lanes: [threads], of the threads.

        is_own: returns whether the thread's warp or its copies wrote a cell, bool [threads, n]. written: of each cell
        of the memory, the group of these copies.
        """
        now, mine = self.meetings[clusters, warps][:, None], lanes[:, None]
        wrote = self._wrote.take(cells)
        if (late := wrote >> _BITS == now).any() and (late & is_own() & _others(wrote, mine)).any():
            raise Fault("reads shared memory that another thread of its warp wrote, without bar.warp.sync")
        if (copied := wrote < 0).any():
            copied &= is_own() & (-1 - wrote != mine) & (written.take(cells) > self.waited[clusters, warps][:, None])
            if copied.any():
                raise Fault("reads shared memory that cp.async of another thread of its warp wrote, without "
                            "bar.warp.sync after that thread's wait")  # fmt: skip
        record, at = now << _BITS | mine, cells * self.meetings.shape[1] + warps[:, None]
        before = self._read.take(at)
        self._read[at] = record
        several = (before >> _BITS == now) & (before != record) | (self._read.take(at) != record)
        if several.any():
            threads, _ = np.nonzero(several)
            self._read[at[several]] = now[threads, 0] << _BITS | _SEVERAL

    def writes(
        self, cells: np.ndarray, clusters: np.ndarray, warps: np.ndarray, lanes: np.ndarray,
        is_own: Callable[[], np.ndarray], changes: np.ndarray,
    ) -> None:  # fmt: skip
        """Record that threads write cells [threads, n]. clusters, warps, lanes: [threads], of the threads.

        is_own: returns whether the thread's warp wrote a cell, bool [threads, n]. changes: bool [threads, n], whether a
        cell's value changes.
        """
        now, mine = self.meetings[clusters, warps][:, None], lanes[:, None]
        self._check_readers(cells, warps, now, mine)
        wrote = self._wrote.take(cells)
        if (late := wrote >> _BITS == now).any() and (late & is_own() & changes & _others(wrote, mine)).any():
            raise Fault("overwrites shared memory that another thread of its warp wrote, without bar.warp.sync")
        record = now << _BITS | mine
        self._wrote[cells] = record
        if (again := self._wrote.take(cells) != record).any():
            self._wrote[cells[again]] = (now + np.zeros_like(cells))[again] << _BITS | _ANY

    def copies(
        self, cells: np.ndarray, warps: np.ndarray, lanes: np.ndarray, issued: np.ndarray
    ) -> None:  # fmt: skip
        """Record writes by `cp.async` to cells. issued: [threads], the number of the last meeting before the issue."""
        self._check_readers(cells, warps, issued[:, None], lanes[:, None])
        self._wrote[cells] = -1 - lanes[:, None]

    def _check_readers(self, cells: np.ndarray, warps: np.ndarray, since: np.ndarray, mine: np.ndarray) -> None:
        read = self._read.take(cells * self.meetings.shape[1] + warps[:, None])
        if (late := read >> _BITS >= since).any() and (late & _others(read, mine)).any():
            raise Fault("overwrites shared memory that another thread of its warp may be reading, without "
                        "bar.warp.sync")  # fmt: skip


def _others(records: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Whether the access of each record was by another thread than `mine`."""
    lanes = records & (1 << _BITS) - 1
    return ((lanes != mine) | (lanes == COLLECTIVE)) & (lanes != _ANY)
