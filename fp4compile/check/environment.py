"""Where and with what something was compiled or run, as results say it."""

import datetime
import platform
from typing import Any

import torch
import triton

from fp4compile import __version__


def of_compiler() -> dict[str, Any]:
    """The versions that decide about machine code; no GPU."""
    return {
        "date": datetime.date.today().isoformat(), "device": "no GPU", "fp4compile": __version__,
        "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
    }  # fmt: skip


def of_gpu() -> dict[str, Any]:
    """The same with the GPU that is there."""
    has = torch.cuda.get_device_properties(torch.cuda.current_device())
    return of_compiler() | {
        "device": has.name, "capability": f"{has.major}.{has.minor}", "multiprocessors": has.multi_processor_count,
        "memory": has.total_memory, "cuda": torch.version.cuda,
    }  # fmt: skip
