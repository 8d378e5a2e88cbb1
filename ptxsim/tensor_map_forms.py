"""Instructions that build and publish tensor maps: `tensormap.replace`, `tensormap.cp_fenceproxy` and their fence.

Sources and confidence:
- `tensormap.replace` reads and writes the whole object by the generic proxy (PTX ISA: "a weak memory operation, on
  the entire 1024-bit opaque tensor-map object"). High.
- `tensormap.cp_fenceproxy` copies the object and releases it; a thread that uses it acquires it by
  `fence.proxy.tensormap` first (PTX ISA, "membar / fence"). High for the need of both; medium that a barrier may
  stand between a warp that acquires and another one that uses the map, which is how Triton compiles kernels.
- The copy begins with a meeting of the warp, whose first thread has made the map: `.sync.aligned` lets threads wait for
  each other, and ptxas puts a WARPSYNC, to which it compiles `bar.warp.sync`, before the lanes load the map. Triton has
  a `bar.warp.sync` there from 3.9 on. Medium: by the PTX ISA, `.sync` need not order memory.
"""

import numpy as np

from ptxsim.control import one_lane
from ptxsim.fault import Fault
from ptxsim.forms import Step, UnknownForm, address_reader, expect, form, immediate, reader
from ptxsim.fragment import Fragment
from ptxsim.lanes import COLLECTIVE
from ptxsim.parse import Instruction, Program
from ptxsim.tensor_maps import FIELDS, NBYTES


def _replaced(field_name: str) -> list[str]:
    bits = "b64" if field_name in ("global_address", "global_stride") else "b32"
    return [f"tensormap.replace.tile.{field_name}.shared::cta.b1024.{bits}"]


@form(*[opcode for name in FIELDS for opcode in _replaced(name)])
def _replace(instruction: Instruction, program: Program) -> Step:
    name = instruction.opcode.split(".")[3]
    first, size, count = FIELDS[name]
    expect(instruction, 2 if count == 1 else 3)
    ordinal = immediate(instruction.operands[1]) if count > 1 else 0
    if ordinal >= count:
        raise UnknownForm(f"{name} {ordinal}, of {count}")
    address = address_reader(instruction.operands[0], 32)
    value = reader(instruction.operands[-1], "u64" if size == 8 else "u32")
    there = slice(first + size * ordinal, first + size * (ordinal + 1))

    def step(fragment: Fragment) -> None:
        machine, running = fragment.machine, fragment.running
        threads = fragment.running_threads()
        clusters, warps, lanes = machine.cluster_of[threads], machine.warp_of[threads], machine.lane_of[threads]
        at, values = address(fragment)[running], fragment.every(value(fragment))[running]
        if (values >> np.uint64(8 * size - 1) >> np.uint64(1)).any():
            raise Fault(f"a value of {int(values.max())} for {name}")
        maps = machine.shared.load_defined(at, NBYTES, clusters, warps, lanes).copy()
        maps[:, there] = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)[:, :size]
        machine.shared.store(at, maps, clusters, warps, lanes)

    return step


@form("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned")
def _publish(instruction: Instruction, program: Program) -> Step:
    """The step of `tensormap.cp_fenceproxy`: the threads of a warp copy the map together."""
    expect(instruction, 3)
    into, source = address_reader(instruction.operands[0], 64), address_reader(instruction.operands[1], 32)
    if immediate(instruction.operands[2]) != NBYTES:
        raise UnknownForm("a tensor map of another size")

    def step(fragment: Fragment) -> None:
        machine = fragment.machine
        which = fragment.whole_warps()
        targets, sources = fragment.by_warp(into(fragment))[which], fragment.by_warp(source(fragment))[which]
        if (targets != targets[:, :1]).any() or (sources != sources[:, :1]).any():
            raise Fault("the threads of a warp copy several tensor maps")
        warps = fragment.warps[which]
        clusters, local = np.divmod(warps, machine.warps_of_cluster)
        machine.meet(clusters, local)
        maps = machine.shared.load_defined(sources[:, 0], NBYTES, clusters, local, np.full(len(local), COLLECTIVE))
        machine.memory.store(targets[:, 0], maps, clusters + machine.first_cluster)
        for target, raw, cluster, warp in zip(targets[:, 0].tolist(), maps, clusters.tolist(), local.tolist(),
                                              strict=True):  # fmt: skip
            machine.tensor_maps.publish(target, raw.copy(), cluster, warp)

    return step


@form("fence.proxy.tensormap::generic.acquire.gpu")
def _acquire(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    address = address_reader(instruction.operands[0], 64)
    if immediate(instruction.operands[1]) != NBYTES:
        raise UnknownForm("a tensor map of another size")

    def step(fragment: Fragment) -> None:
        machine, addresses = fragment.machine, address(fragment)
        lanes = one_lane(fragment)
        for at, warp, cluster in {(int(addresses[lane]), warp, cluster) for lane, warp, cluster in lanes}:
            machine.tensor_maps.acquire(at, cluster, machine.local_warp(warp))

    return step
