"""Imported before a process forks others, so that torch hashes its own files and Triton's once for all of them."""

from torch._inductor.codecache import torch_key
from torch._inductor.runtime.triton_compat import triton_key

torch_key(), triton_key()
