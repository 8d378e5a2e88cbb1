"""The host's part of a graph's time: how long it takes to issue the graph's launches.

Predicted times are the GPU's, as under CUDA graphs. Without CUDA graphs the host issues each launch from the
code that Inductor generates, and the GPU waits for the host where that takes longer than the kernels.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fp4compile.roofline.time_terms import Step

# Seconds of the host for one launch without CUDA graphs. Measured on an H200 (torch 2.11): the host's time to issue a
# step of four Llama-3-8B layers of 8192 tokens, forward and backward. With CUDA graphs it was 3.6 ms in bf16 and 3.7 ms
# in `float8_rowwise`. Without them, bf16 took 6 ms for 266 launches, torchao's FP8 11 ms for 506 (row-scaled) and 20 ms
# for 516 (tensor-scaled), and `float8_rowwise` 22 ms for 522: 9, 15, 32 and 35 us more for each launch, if torchao's
# steps also take 3.7 ms with CUDA graphs. A low figure of these is taken, so that advice seldom errs. `mxfp8` and
# `nvfp4_train` (57 ms for 1114 launches, 122 ms for 1607) are left out: the second took as long as the GPU, so the host
# waited for it, and the first may have.
LAUNCH = 15e-6


@dataclass(frozen=True)
class GraphLaunches:
    """What a graph launches, forward and backward together.

    count: the number of launches. seconds: the predicted seconds of the GPU for all of them.
    """

    count: int = 0
    seconds: float = 0.0

    def __add__(self, other: "GraphLaunches") -> "GraphLaunches":
        return GraphLaunches(self.count + other.count, self.seconds + other.seconds)

    @property
    def host_seconds(self) -> float:
        """The predicted seconds of the host to issue the launches without CUDA graphs."""
        return LAUNCH * self.count

    @property
    def host_binds(self) -> bool:
        """Whether issuing the launches takes longer than running them."""
        return self.host_seconds > self.seconds


def launches_of(steps: Iterable[Step]) -> GraphLaunches:
    """The launches of a graph's steps together."""
    steps = list(steps)
    return GraphLaunches(sum(step.launches for step in steps), sum(step.seconds for step in steps))
