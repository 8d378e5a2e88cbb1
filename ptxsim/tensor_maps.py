"""Tensor maps: the meaning of their bytes, the places of a box's bytes, and the order of publication and use.

A tensor map is an opaque object of 128 bytes, which kernels fill by `tensormap.replace` in shared memory and publish
in global memory. Only instructions read it, so its layout is this simulator's own:

    bytes  0-7   address          bytes 16-35  box, 5 x 4 bytes
    byte   8     rank - 1         bytes 36-55  dimensions, 5 x 4 bytes
    byte   9     element type     bytes 56-87  strides of dimensions 1 to 4, 4 x 8 bytes
    byte  10     swizzle mode     bytes 88-107 element strides, 5 x 4 bytes
    byte  11     interleave       bytes 108-127 zero
    byte  12     fill mode
    bytes 13-15  zero

A kernel has to clear the object first, as the fields that it does not replace are zero here.

Sources and confidence:
- Fields and their values: PTX ISA, `tensormap.replace` (rank less one; element types, swizzle modes and fill modes by
  number; strides in bytes). High.
- Constraints of a map: CUDA driver API, `cuTensorMapEncodeTiled` (address and strides multiples of 16 bytes, at most
  256 elements along a dimension of the box, its inner rows multiples of 16 bytes and no longer than the swizzle's
  span). High. 4-bit elements with gaps (b4x16_p64): multiples of 32 bytes and of 128 elements; high. Other element
  types, interleaved layouts, element strides, fill modes, and inner rows shorter than the swizzle's span are Faults,
  because no kernel has them.
- Gaps are not written, and a copy completes the bytes of global memory on the mbarrier, half of those in shared
  memory. Source: the bytes that Triton and DeepGEMM expect there. Medium-high.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ptxsim.clocks import KNOWN
from ptxsim.fault import Fault
from ptxsim.shared import swizzled
from ptxsim.state import PARAMETERS, State

NBYTES = 128
# For each field: its first byte, the bytes of an element, and the number of elements.
FIELDS = {
    "global_address": (0, 8, 1), "rank": (8, 1, 1), "elemtype": (9, 1, 1), "swizzle_mode": (10, 1, 1),
    "interleave_layout": (11, 1, 1), "fill_mode": (12, 1, 1), "box_dim": (16, 4, 5), "global_dim": (36, 4, 5),
    "global_stride": (56, 8, 4), "element_stride": (88, 4, 5),
}  # fmt: skip
_ZERO = np.r_[13:16, 108:128]
# The bytes in shared memory of element types by number: u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, b4x16_p64.
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2, 14: 1}
_WITH_GAPS = 14  # b4x16_p64
_SPANS = {0: 0, 1: 32, 2: 64, 3: 128}  # of swizzle modes by number


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the shape of the box that a copy moves; the innermost dimension is first.

    element: bytes of an element in shared memory. gaps: whether 16 elements of 4 bits, 8 bytes of global memory, lie in
    every 16 bytes of shared memory, at their beginning. span: of the swizzle, 0 for none. strides: of the outer
    dimensions, in bytes.
    """

    address: int
    element: int
    gaps: bool
    span: int
    box: tuple[int, ...]
    dims: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, raw: np.ndarray) -> "TensorMap":
        """The map in 128 bytes. Raises Fault, naming the field, for a value that hardware does not support."""
        values = {
            name: [int(one) for one in raw[first : first + size * count].view(f"u{size}")]
            for name, (first, size, count) in FIELDS.items()
        }
        kind, mode = values["elemtype"][0], values["swizzle_mode"][0]
        rank = values["rank"][0] + 1
        if raw[_ZERO].any():
            raise Fault("a tensor map that was not cleared before its fields were replaced")
        if rank > 5:
            raise Fault(f"a tensor map of rank {rank}")
        if kind not in _ELEMENT_BYTES or mode not in _SPANS:
            raise Fault(f"a tensor map of element type {kind} and swizzle mode {mode}, which are not simulated")
        if values["interleave_layout"][0] or values["fill_mode"][0]:
            raise Fault("a tensor map with an interleaved layout or a fill mode, which are not simulated")
        beyond = {name: values[name][rank:] for name in ("box_dim", "global_dim", "element_stride")}
        beyond["global_stride"] = values["global_stride"][rank - 1 :]
        if any(map(any, beyond.values())):
            raise Fault(f"a tensor map of rank {rank} with fields {beyond} beyond it: it was not cleared")
        if any(one != 1 for one in values["element_stride"][:rank]):
            raise Fault(f"a tensor map of element strides {values['element_stride'][:rank]}, which are not simulated")
        made = cls(values["global_address"][0], _ELEMENT_BYTES[kind], kind == _WITH_GAPS, _SPANS[mode],
                   tuple(values["box_dim"][:rank]), tuple(values["global_dim"][:rank]),
                   tuple(values["global_stride"][: rank - 1]))  # fmt: skip
        made._check()
        return made

    def _check(self) -> None:
        if any(not 1 <= one <= 256 for one in self.box):
            raise Fault(f"a tensor map of box {self.box}: a dimension has 1 to 256 elements")
        if any(one < 1 for one in self.dims):
            raise Fault(f"a tensor map of dimensions {self.dims}")
        multiple = 32 if self.gaps else 16
        if self.address % multiple or any(one % multiple or not one < 1 << 40 for one in self.strides):
            raise Fault(f"a tensor map of address {self.address:#x} and strides {self.strides}, which are no "
                        f"multiples of {multiple} bytes")  # fmt: skip
        if self.gaps and (self.box[0] != 128 or self.dims[0] % 128 or self.span not in (0, 128)):
            raise Fault(f"a tensor map of 4-bit elements with box {self.box}, dimensions {self.dims} and a swizzle of "
                        f"{self.span}: rows have multiples of 128 elements")  # fmt: skip
        if self.row % 16:
            raise Fault(f"a tensor map whose box has rows of {self.row} bytes, no multiple of 16")
        if self.span and self.row > self.span:
            raise Fault(f"a tensor map whose box has rows of {self.row} bytes, with a swizzle of {self.span}")
        if self.span and self.row < self.span:
            raise Fault(f"a tensor map whose box has rows of {self.row} bytes, with a swizzle of {self.span}, which is "
                        "not simulated")  # fmt: skip

    @property
    def row(self) -> int:
        """The bytes of a row of the box in shared memory."""
        return self.box[0] * self.element

    @property
    def footprint(self) -> int:
        """The bytes of the box in shared memory."""
        return int(np.prod(self.box)) * self.element

    def unit(self, first: int) -> int:
        """The bytes that a box moves at a time, where its rows begin at an element: 16, if the tensor's edge allows."""
        if self.gaps:
            return 8
        edges = (first * self.element, self.row, self.dims[0] * self.element)
        return 16 if not any(edge % 16 for edge in edges) else 1

    def places(self, address: int, unit: int) -> np.ndarray:
        """The addresses in shared memory of the units of bytes of a box at an address, row by row."""
        at = np.arange(0, self.footprint, unit)
        if self.gaps:
            at = at[at % 16 < 8]
        return swizzled(address + at, self.span)

    @cached_property
    def _rows(self) -> np.ndarray:
        """The coordinates of the box's rows along the outer dimensions: [rank - 1, rows], in the order of memory."""
        outer = self.box[1:]
        if not outer:
            return np.zeros((0, 1), np.int64)
        return np.indices(outer[::-1]).reshape(len(outer), -1)[::-1].astype(np.int64)

    def units_of_box(self, coordinates: list[int], unit: int) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, whether they lie in the tensor) of the units of bytes of the box at coordinates: [units] each."""
        if self.gaps and coordinates[0] % 128:
            raise Fault(f"coordinate {coordinates[0]} of 4-bit elements, no multiple of 128")
        if len(coordinates) != len(self.box):
            raise Fault(f"{len(coordinates)} coordinates for a tensor map of rank {len(self.box)}")
        at = self._rows + np.array(coordinates[1:], np.int64)[:, None]
        dims, strides = (np.array(each, np.int64)[:, None] for each in (self.dims[1:], self.strides))
        rows = self.address + (at * strides).sum(0)
        rows_inside = np.asarray(((at >= 0) & (at < dims)).all(0))
        first, count, end = (each * self.element // (1 + self.gaps) for each in
                             (coordinates[0], self.box[0], self.dims[0]))  # fmt: skip
        columns = np.arange(first, first + count, unit)
        columns_inside = (columns >= 0) & (columns < end)
        return (rows[:, None] + columns).ravel(), (rows_inside[:, None] & columns_inside).ravel()


@dataclass(frozen=True)
class HostMap:
    """A tensor map that the host makes, as an argument of a kernel. tensor: the tensor. fields: all but its address."""

    tensor: torch.Tensor
    fields: dict[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], meta: Mapping[str, Any], nan: bool
    ) -> "HostMap":
        """The map of a descriptor of Triton, as `cuTensorMapEncodeTiled` makes it.

        shape, strides: in elements, the innermost dimension last. meta: what the compiler says of the descriptor.
        nan: whether elements outside of the tensor are NaN.
        """
        dims, gaps = list(shape[::-1]), bool(meta["fp4_padded"])
        if gaps:
            dims[0] *= 2
        rank = len(dims)
        return cls(tensor, {
            "rank": (rank - 1,), "elemtype": (meta["elem_type"],), "swizzle_mode": (meta["swizzle"],),
            "fill_mode": (int(nan),), "box_dim": tuple(meta["block_size"][::-1]), "global_dim": tuple(dims),
            "global_stride": tuple(each * meta["elem_size"] for each in strides[-2::-1]), "element_stride": (1,) * rank,
        })  # fmt: skip

    def bits(self, address: int) -> int:
        """The map's 128 bytes as a number, with the address of the tensor's first element."""
        raw = np.zeros(NBYTES, np.uint8)
        for name, values in (self.fields | {"global_address": (address,)}).items():
            first, size, _ = FIELDS[name]
            raw[first : first + size * len(values)] = np.array(values, f"u{size}").view(np.uint8)
        return int.from_bytes(raw.tobytes(), "little")


@dataclass
class Published:
    """A map in global memory.

    raw: its bytes. cluster, warp, epoch: of its release. acquired: the epoch in which each warp acquired it. read: the
    epochs of each clock agent whose copies read the map. under_way: the number of copies that have not read it yet.
    """

    raw: np.ndarray
    cluster: int
    warp: int
    epoch: int
    acquired: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    under_way: int = 0

    @cached_property
    def map(self) -> TensorMap:
        return TensorMap.of(self.raw)

    def was_read(self, agent: int, epoch: int) -> None:
        """Record that a copy, which completes as an agent's epoch, has read the map."""
        self.read[agent] = max(self.read.get(agent, 0), epoch)


class TensorMaps:
    """The maps in global memory that programs of a machine released, by address."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.found: dict[int, Published] = {}

    def publish(self, address: int, raw: np.ndarray, cluster: int, warp: int) -> None:
        """Record that a warp releases a map at an address in global memory."""
        rows = self.machine.clocks.release(cluster, warp)
        before = self.found.get(address)
        if before is not None:
            if before.cluster != cluster:
                raise Fault("overwrites a tensor map of another program")
            if before.under_way or any(rows[KNOWN][agent] < epoch for agent, epoch in before.read.items()):
                raise Fault("overwrites a tensor map that a copy may be reading")
        self.found[address] = Published(raw, cluster, warp, int(rows[KNOWN][warp]))

    def acquire(self, address: int, cluster: int, warp: int) -> None:
        """Record that a warp acquires the map at an address."""
        rows = self.machine.clocks.release(cluster, warp)
        found = self._at(address, cluster)
        if rows[KNOWN][found.warp] < found.epoch:
            raise Fault("acquires a tensor map without a wait for its release")
        found.acquired[warp] = int(rows[KNOWN][warp])

    def used(self, address: int, cluster: int, rows: np.ndarray) -> Published:
        """The map at an address, for a copy with these clocks at its issue. One of a parameter needs no release."""
        if address >= PARAMETERS:
            if address not in self.found:
                raw = self.machine.parameters[address - PARAMETERS :][:NBYTES]
                self.found[address] = Published(raw, cluster, 0, 0)
            self.found[address].under_way += 1
            return self.found[address]
        found = self._at(address, cluster)
        if not any(rows[KNOWN][warp] >= epoch for warp, epoch in found.acquired.items()):
            raise Fault("uses a tensor map that no fence.proxy.tensormap acquired")
        memory = self.machine.memory
        raw, _ = memory.copied(np.array([address]), NBYTES, cluster + self.machine.first_cluster)
        if (raw != found.raw).any():
            raise Fault("uses a tensor map that was overwritten after its release")
        found.map  # noqa: B018 (check its fields here)
        found.under_way += 1
        return found

    def _at(self, address: int, cluster: int) -> Published:
        found = self.found.get(address)
        if found is None:
            raise Fault(f"no tensor map was released at {address:#x}")
        if found.cluster != cluster:
            raise Fault("uses a tensor map of another program")
        return found
