"""What several processes do so that they share GPUs and cores well. None of it imports torch where nobody has."""

import os
import sys

# A process compiles by itself: with as many processes as cores, a pool of compilers in each only costs its start and
# its memory. Scalar C++ compiles in half the time. Small tensors need no threads.
FOR_WORKERS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def rotated(worker: int) -> dict[str, str]:
    """The variables that make another GPU the first one of each worker; none where there is only one GPU.

    All GPUs stay visible: some tests need two.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("GPU_RUN_DEVICES", "")).split(",")
    first = worker % len(devices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first:] + devices[:first])} if len(devices) > 1 else {}


def settle_inductor() -> None:
    """Let Inductor compile each of its kernels once.

    Otherwise it compiles pointwise kernels with two to six sizes of blocks each, and times these on a GPU that all the
    processes share. The size changes no result.
    """
    if "torch" not in sys.modules:
        return
    from torch._inductor import config

    config.triton.autotune_pointwise = False


def still_usable() -> bool:
    """Whether this process can use the GPU, if it has used it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return True
    except RuntimeError:
        return False
