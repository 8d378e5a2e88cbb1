"""What a GPU can do. (How kernels are launched on it: the `heuristics` of each family of templates.)"""

from dataclasses import dataclass

# Multiprocessors by compute capability, for a GPU that is not there: H200 (90), B200 (100), B300 (103), RTX PRO 6000
# Blackwell (120).
_MULTIPROCESSORS = {90: 132, 100: 148, 103: 160, 120: 188}


@dataclass(frozen=True)
class Target:
    """A GPU, as far as kernels and their launches depend on it.

    sm: its compute capability, 90 for 9.0; 0 stands for Triton's interpreter. multiprocessors: how many it has. GPUs of
    one capability differ in that: an H100 PCIe has 114, a MIG slice of an H200 fewer. Where it is not given, it is that
    of the listed capability which is nearest below, or of an H200 if there is none.
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
        """Which form of the device functions in `templates.device.elements` the GPU runs: 0, 90, 100 or 120."""
        if self.sm >= 100:
            return 120 if self.sm >= 120 else 100
        return 90 if self.sm >= 89 else 0

    @property
    def arch(self) -> str:
        """The architecture name that ptxas needs for the instructions used here, e.g. "sm_90" or "sm_100a"."""
        return f"sm_{self.sm}a" if self.sm >= 100 else f"sm_{self.sm}"
