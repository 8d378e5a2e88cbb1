"""Kernels written by hand in PTX, executed in the simulator."""

from typing import Any

import numpy as np

from ptxsim.global_memory import GlobalMemory
from ptxsim.parse import parse
from ptxsim.run import LOCKSTEP, Kernel, Schedule, run

Unwritten = dict[int, Any]


def module(body: str, threads: int, parameters: int, cluster: int = 1) -> str:
    """A module whose kernel `hand` has this body. Its parameters are addresses `p0`, `p1`, ...

    Registers: %r, %rd, %f and %p, 400 of each. `global_smem` is the dynamic shared memory.
    """
    listed = ",\n".join(f"\t.param .u64 .ptr .global .align 1 p{i}" for i in range(parameters))
    pair = f"\n.explicitcluster\n.reqnctapercluster {cluster}" if cluster > 1 else ""
    return f""".version 9.0
.target sm_100a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry hand(
{listed}
)
.reqntid {threads}{pair}
{{
\t.reg .pred %p<400>;
\t.reg .b32 %r<400>;
\t.reg .f32 %f<400>;
\t.reg .b64 %rd<400>;
{body}
\tret;
}}
"""


def run_body(
    body: str, tensors: list[np.ndarray], *, threads: int, shared_bytes: int = 0, grid: int = 1, cluster: int = 1,
    schedule: Schedule = LOCKSTEP, unwritten: Unwritten | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """What the tensors hold after a kernel has run; parameter i is the address of tensor i.

    unwritten: of some tensors, by index, which bytes nothing wrote: anything that indexes a flat array.
    """
    text = module(body, threads, len(tensors), cluster)
    return run_text(text, tensors, shared_bytes=shared_bytes, grid=grid, schedule=schedule, unwritten=unwritten)


def run_text(
    text: str, tensors: list[np.ndarray], *, shared_bytes: int = 0, grid: int = 1, schedule: Schedule = LOCKSTEP,
    unwritten: Unwritten | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """`run_body` of a whole module."""
    memory = GlobalMemory()
    addresses = [
        memory.allocate(each.nbytes, np.ascontiguousarray(each).reshape(-1).view(np.uint8)) for each in tensors
    ]
    for index, which in (unwritten or {}).items():
        written = np.ones(tensors[index].nbytes, bool)
        written[which] = False
        memory.set_written(addresses[index], written)
    kernel = Kernel.of(parse(text))
    run(kernel, memory, addresses, grid, shared_bytes, schedule)
    return [memory.read(address, each.nbytes).view(each.dtype).reshape(each.shape)
            for address, each in zip(addresses, tensors, strict=True)]  # fmt: skip


def edited(body: str, *edits: tuple[str, str]) -> str:
    """A body with some places changed, each of which has to be there once: (old, new)."""
    for old, new in edits:
        assert body.count(old) == 1, f"{old}: {body.count(old)} times"
        body = body.replace(old, new)
    return body
