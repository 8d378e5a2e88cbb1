"""Local memory: arrays that belong to one thread.

Source: PTX ISA, "Local state space"; confidence high. Compilers put arrays there that are indexed at run time, as the
reduction of large arguments of sine and cosine does.
"""

import numpy as np

from ptxsim.fault import Fault

_START = 1024  # the address of the first array: no array begins at 0


class LocalMemory:
    """The arrays of all threads. addresses: of each array, by its name; the same for every thread.

    data: uint8 [threads, bytes]. written: whether each byte was written.
    """

    def __init__(self, threads: int, arrays: dict[str, int]) -> None:
        self.addresses: dict[str, int] = {}
        end = 0
        for name, nbytes in arrays.items():
            self.addresses[name] = _START + end
            end += -(-(nbytes + 1) // 16) * 16  # at least one byte between arrays
        self.data = np.full((threads, end), 0xEE, np.uint8)
        self.written = np.zeros((threads, end), bool)
        self._inside = np.zeros(end, bool)
        for name, nbytes in arrays.items():
            first = self.addresses[name] - _START
            self._inside[first : first + nbytes] = True

    def load(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(the bytes at aligned addresses [threads], uint8 [threads, size]; whether each thread wrote all of them)."""
        rows, columns = self._at(threads, addresses, size)
        return self.data[rows, columns], self.written[rows, columns].all(1)

    def store(self, threads: np.ndarray, addresses: np.ndarray, values: np.ndarray, written: np.ndarray) -> None:
        """Write bytes uint8 [threads, size] at aligned addresses [threads]. written: whose bytes are defined."""
        rows, columns = self._at(threads, addresses, values.shape[1])
        self.data[rows, columns] = values
        self.written[rows, columns] = written[:, None]

    def _at(self, threads: np.ndarray, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        columns = (addresses - _START)[:, None] + np.arange(size)
        if (addresses % size).any():
            raise Fault(f"an access to local memory that is not aligned to {size} bytes")
        if columns.min() < 0 or columns.max() >= len(self._inside) or not self._inside[columns].all():
            raise Fault("an access outside of all arrays in local memory")
        return threads[:, None], columns
