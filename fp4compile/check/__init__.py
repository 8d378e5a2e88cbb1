"""Checks of kernels: machine code for GPUs that need not be there, and values and times on the GPU that is there."""
