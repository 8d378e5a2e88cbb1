"""Training on several ranks: what FSDP2 gathers. `docs/distributed.md` is for users."""

from fp4compile.distributed.gather import gather_quantized_

__all__ = ["gather_quantized_"]
