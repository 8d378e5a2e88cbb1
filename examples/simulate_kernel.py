"""Execute a kernel of Triton for a B200 on a machine without a GPU, and let the simulator find a race.

    python examples/simulate_kernel.py [--arch sm_100a] [--seed 0]

The kernel sums the rows of a matrix by several programs a row. With an atomic sum the result is right; with a load and
a store, two programs may lose an addition, which the simulator reports whatever order this run happened to take.
"""

import argparse

import torch
import triton
import triton.language as tl

import ptxsim


@triton.jit
def sum_rows(x, out, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + row * n + at, at < n, other=0.0), 0)
    if ATOMIC:
        tl.atomic_add(out + row, part)
    else:
        tl.store(out + row, tl.load(out + row) + part)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    x = torch.randint(-8, 8, (5, 1000)).float()
    with ptxsim.gpu(given.arch, ptxsim.Schedule(given.seed)) as gpu:
        for atomic in (True, False):
            out = torch.zeros(5)
            try:
                sum_rows[lambda meta: (5, triton.cdiv(1000, meta["BLOCK"]))](x, out, 1000, ATOMIC=atomic, BLOCK=256)
            except ptxsim.Fault as fault:
                print(f"atomic={atomic}: fault: {fault}")
            else:
                print(f"atomic={atomic}: {'right' if torch.equal(out, x.sum(1)) else 'wrong'}")
    print(f"{gpu.tally.instructions} warp instructions")


if __name__ == "__main__":
    main()
