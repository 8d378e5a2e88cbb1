"""`nvlink_connects`: whether NVLink connects all GPUs of a process group, by what every rank sees."""

from pathlib import Path

import torch
import torch.distributed as dist

from fp4compile import _compat
from fp4compile.hardware import gathers_through_host

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs between hosts, and is equal in all containers of one


def nvlink_connects(group: dist.ProcessGroup) -> bool:
    """Whether the ranks' current CUDA devices are of one host, and NVLink connects each to each other.

    A collective: every rank of the group calls it, and all get the same answer. False where the group does not move
    tensors of GPUs by NCCL, where NCCL moves them through the host (`gathers_through_host`), for GPUs of several hosts,
    and where a rank cannot tell: it sees only its own GPU, or torch does not say what connects them.
    """
    if "cuda:nccl" not in dist.get_backend_config(group):
        return False
    seen: list[tuple[str, str, frozenset[str]]] = [("", "", frozenset())] * dist.get_world_size(group)
    dist.all_gather_object(seen, _neighbours(), group=group)
    hosts, devices = {host for host, _, _ in seen}, {device for _, device, _ in seen}
    alone = len(hosts) > 1 or len(devices) < max(len(seen), 2)
    return not alone and all(devices - {device} <= reached for _, device, reached in seen)


def _neighbours() -> tuple[str, str, frozenset[str]]:
    """The host's boot, this rank's GPU, and the GPUs that NVLink connects it to; GPUs by their UUID."""
    host = _BOOT.read_text() if _BOOT.exists() else ""
    current = torch.cuda.current_device()
    links = [] if gathers_through_host() else _compat.nvlinks(current)
    return host, _uuid(current), frozenset(_uuid(index) for index, count in enumerate(links) if count)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
