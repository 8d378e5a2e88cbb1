"""The second rank of a group of two, which writes to the first rank's tensor: see test_weights_in_groups.py.

python -m tests.helpers.group_partner STORE OPERATION...

STORE: the file at which the ranks meet. OPERATION: "broadcast", "reduce" or "send", of a tensor of SHAPE each.
"""

import sys

import torch
import torch.distributed as dist

from tests.helpers import process_groups

SHAPE = (48, 64)
RANK = 1


def values(number: int) -> torch.Tensor:
    """What the partner writes by its operation of this number, or adds to what is there."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + number))


def main(store: str, *operations: str) -> None:
    process_groups.begin(store, RANK)
    for number, operation in enumerate(operations):
        if operation == "broadcast":
            dist.broadcast(values(number), RANK)
        elif operation == "reduce":
            dist.all_reduce(values(number))
        else:
            dist.send(values(number), 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
