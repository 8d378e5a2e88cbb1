"""The versions and the GPU with which code was compiled or run, for results."""

import datetime
import platform
from typing import Any

import torch
import triton

from fp4compile import __version__


def of_compiler() -> dict[str, Any]:
    """The versions that determine machine code, without a GPU."""
    return {
        "date": datetime.date.today().isoformat(), "device": "no GPU", "fp4compile": __version__,
        "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
    }  # fmt: skip


def of_gpu() -> dict[str, Any]:
    """The versions that determine machine code, and this machine's GPU."""
    has = torch.cuda.get_device_properties(torch.cuda.current_device())
    return of_compiler() | {
        "device": has.name, "capability": f"{has.major}.{has.minor}", "multiprocessors": has.multi_processor_count,
        "memory": has.total_memory, "cuda": torch.version.cuda,
    }  # fmt: skip
