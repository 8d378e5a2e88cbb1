"""Triton kernels, one family a file. Nothing here knows FX."""
