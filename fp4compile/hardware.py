"""GPUs: the properties that kernels and launches depend on (`Target`), and published rates (`Gpu`, for predictions).

The `heuristics` of each family of templates decide how kernels are launched on a GPU. Each published figure has its
source. Shares of published rates were measured on an H200, in the named file. Shares of other GPUs are assumptions, as
`GPUS[name].share_source` notes.
"""

import functools
import itertools
import math
import os
from dataclasses import dataclass

import torch

from fp4compile.formats.formats import unknown_name


@dataclass(frozen=True)
class Target:
    """The properties of a GPU that kernels and their launches depend on.

    sm: its compute capability, 90 for 9.0; 0 stands for Triton's interpreter.
    multiprocessors: how many it has. GPUs of one capability differ: an H100 PCIe has 114, a MIG slice of an H200 fewer.
        The default is the number in `_MULTIPROCESSORS` for the highest capability up to `sm`, or else for an H200.
    """

    sm: int
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        if self.multiprocessors == 0:
            known = [sm for sm in _MULTIPROCESSORS if sm <= self.sm]
            object.__setattr__(self, "multiprocessors", _MULTIPROCESSORS[max(known, default=90)])

    @property
    def block_scaled_matrix_units(self) -> bool:
        """Whether the matrix units multiply NVFP4 and MX operands."""
        return self.sm >= 100

    @property
    def float8_matrix_units(self) -> bool:
        """Whether the matrix units multiply FP8 operands."""
        return self.sm >= 89

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel can start before the previous one is done; see `templates.device.dependent_launch`."""
        return self.sm >= 90

    @property
    def shared_memory(self) -> int:
        """The most bytes of shared memory that one program can have."""
        if self.sm < 80 or self.sm in (86, 89, 120, 121):
            return 99 * 1024
        return 163 * 1024 if self.sm < 90 else 227 * 1024

    @property
    def isa(self) -> int:
        """The variant of the device functions in `templates.device.elements` that the GPU runs: 0, 90, 100 or 120."""
        if self.sm >= 100:
            return 120 if self.sm >= 120 else 100
        return 90 if self.sm >= 89 else 0


_MEASURED = "benchmarks/results/linear_h200.json, quantize_h200.json, ceilings_h200.json"
_ASSUMED = f"not measured; the shares of the H200 ({_MEASURED})"
# Published for cuBLAS on a B200: 5.4 of 9 PFLOP/s for NVFP4 with M = N = K = 8192.
_ASSUMED_FP4 = f"{_ASSUMED}; FP4 as published for cuBLAS on a B200"


_WHOLE = ("sm", "multiprocessors")
_RATES = ("bf16", "fp8", "fp4", "fp32", "bandwidth", "launch", "product_launch")
_SHARES = ("bf16_share", "fp8_share", "fp4_share", "memory_share")


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that predicted times depend on.

    name: its common name. sm: its compute capability, 90 for 9.0. multiprocessors: how many it has.
    bf16, fp8, fp4: dense FLOP/s of the matrix units with float32 sums; None where they have no such operands.
    fp32: FLOP/s in float32 outside of the matrix units, where torch multiplies float32 unless TF32 is allowed; None
        counts them at TF32's rate, half of bf16's.
    bandwidth: bytes/s of device memory.
    source: where these figures are published.
    bf16_share, fp8_share, fp4_share: the share of the FLOP/s that a large matmul of the library reaches.
    memory_share: the share of the bandwidth that a large copy reaches.
    launch: seconds that one more kernel adds to a CUDA graph, without its work. product_launch: seconds that one more
        matmul adds without its work; its pipeline has to fill and to drain.
    share_source: the source of the shares and the seconds.
    devices: the names that torch gives to this GPU, by which `present` finds it.

    Raises ValueError for a figure that is not positive and finite, and for a share above 1; TypeError for one that is
    no number.
    """

    name: str
    sm: int
    multiprocessors: int
    bf16: float
    bandwidth: float
    source: str
    fp8: float | None = None
    fp4: float | None = None
    fp32: float | None = None
    bf16_share: float = 0.75
    fp8_share: float = 0.71
    fp4_share: float = 0.6
    memory_share: float = 0.88
    launch: float = 1.4e-6
    product_launch: float = 4.7e-6
    share_source: str = _ASSUMED_FP4
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_WHOLE, *_RATES, *_SHARES):
            value = getattr(self, name)
            if value is None and name in ("fp8", "fp4", "fp32"):
                continue
            kind, wanted = (int, "a whole number") if name in _WHOLE else (int | float, "a number")
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise TypeError(f"{name}={value!r}: expected {wanted}")
            if name in _SHARES and not 0 < (value or 0) <= 1:
                raise ValueError(f"{name}={value}: must be above 0 and at most 1")
            if not 0 < (value or 0) < math.inf:
                raise ValueError(f"{name}={value}: must be positive and finite")

    @property
    def target(self) -> Target:
        """The properties that kernels and their launches depend on."""
        return Target(self.sm, self.multiprocessors)

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of torch's matmul of a dtype under its current settings: float32 in TF32 only if allowed."""
        if dtype.itemsize == 1:
            return self.fp8 or self.bf16
        if dtype.itemsize == 2:
            return self.bf16
        tf32 = torch.backends.cuda.matmul.allow_tf32
        return self.bf16 / 2 if tf32 or self.fp32 is None else self.fp32

    @property
    def copy_rate(self) -> float:
        """Bytes/s that a large copy reads and writes together."""
        return self.bandwidth * self.memory_share


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "H100", 90, 132, bf16=989.4e12, fp8=1978.9e12, fp32=67e12, bandwidth=3.35e12,
            share_source=_ASSUMED, devices=("NVIDIA H100 80GB HBM3",),
            source="NVIDIA H100 Tensor Core GPU data sheet, H100 SXM, half of the figures with sparsity",
        ),
        Gpu(
            "H200", 90, 132, bf16=989.4e12, fp8=1978.9e12, fp32=67e12, bandwidth=4.8e12,
            share_source=_MEASURED, devices=("NVIDIA H200",),
            source="NVIDIA H200 Tensor Core GPU data sheet, H200 SXM, half of the figures with sparsity",
        ),
        Gpu(
            "B200", 100, 148, bf16=2.25e15, fp8=4.5e15, fp4=9e15, fp32=75e12, bandwidth=8e12, devices=("NVIDIA B200",),
            source="NVIDIA HGX B200 data sheet, an eighth of eight GPUs, without sparsity",
        ),
        Gpu(
            "GB200", 100, 148, bf16=2.5e15, fp8=5e15, fp4=10e15, fp32=80e12, bandwidth=8e12, devices=("NVIDIA GB200",),
            source="NVIDIA GB200 NVL72 data sheet, a 72nd of 72 GPUs, half of the figures with sparsity",
        ),
        Gpu(
            "B300", 103, 160, bf16=2.25e15, fp8=4.5e15, fp4=13.5e15, fp32=75e12, bandwidth=8e12,
            devices=("NVIDIA B300 SXM6 AC",),
            source="NVIDIA HGX B300 data sheet, an eighth of eight GPUs, without sparsity",
        ),
        Gpu(
            "RTX PRO 6000", 120, 188, bf16=500e12, fp8=1000e12, fp4=2000e12, fp32=125e12, bandwidth=1.792e12,
            devices=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
            source="NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet, half of its 4000 AI TOPS (FP4 with "
            "sparsity); FP8 and bf16 taken as a half and a quarter of FP4, which the data sheet does not list",
        ),
        Gpu(
            "RTX 5090", 120, 170, bf16=209.5e12, fp8=419e12, fp4=1676e12, fp32=104.8e12, bandwidth=1.792e12,
            devices=("NVIDIA GeForce RTX 5090",),
            source="NVIDIA RTX Blackwell GPU Architecture, GeForce RTX 5090, dense, with FP32 accumulation",
        ),
    )
}  # fmt: skip
# The GPU that stands for each compute capability where none is present.
OF_CAPABILITY = {90: GPUS["H200"], 100: GPUS["B200"], 103: GPUS["B300"], 120: GPUS["RTX PRO 6000"]}
_MULTIPROCESSORS = {sm: gpu.multiprocessors for sm, gpu in OF_CAPABILITY.items()}


def named(gpu: str | Gpu) -> Gpu:
    """The GPU of a name of `GPUS`, case-insensitively; a `Gpu` is returned unchanged.

    Raises ValueError, which lists the known names, for an unknown name; TypeError for anything else.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(f"gpu: expected a name or a Gpu, got {type(gpu).__name__}")
    found = {name.lower(): each for name, each in GPUS.items()}.get(gpu.lower())
    if found is None:
        raise ValueError(unknown_name("GPU", gpu, GPUS))
    return found


def present() -> Gpu | None:
    """The current CUDA device if it is one of `GPUS`; None for another one (a MIG slice, too), and without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name(torch.cuda.current_device())
    return next((gpu for gpu in GPUS.values() if device in gpu.devices), None)


def gathers_through_host() -> bool:
    """Whether collectives between the GPUs are known to go through the host's memory, at about 20 GB/s.

    True under NCCL_P2P_DISABLE=1, and if no GPU of this process has peer access to another one. False where the link is
    fast or unknown: a process with one GPU, and GPUs of several hosts.
    """
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return True
    return torch.cuda.is_available() and not _reads_other_memory(torch.cuda.device_count())


@functools.cache
def _reads_other_memory(count: int) -> bool:
    """Whether one of the first `count` GPUs has peer access to another one; True for a single GPU."""
    pairs = itertools.permutations(range(count), 2)
    return count < 2 or any(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
