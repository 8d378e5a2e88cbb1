"""The second rank of a group of two, which writes to the first rank's tensor: see test_weights_in_groups.py.

python tests/helpers/group_partner.py STORE OPERATION...

STORE: the file at which the ranks meet. OPERATION: "broadcast", "reduce" or "send", of a tensor of SHAPE each.
"""

import sys

import torch
import torch.distributed as dist

SHAPE = (48, 64)
RANK = 1


def values(number: int) -> torch.Tensor:
    """What the partner writes by its operation of this number, or adds to what is there."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + number))


def main(store: str, *operations: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=RANK, world_size=2)
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
