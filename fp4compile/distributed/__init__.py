"""Training on several ranks: FSDP2 gathers the codes of weights. `docs/distributed.md` is for users."""

from fp4compile.distributed.gather import gather_quantized_

__all__ = ["gather_quantized_"]
