"""Checks of kernels: machine code for GPUs that need not be present, and values and times on this machine's GPU."""
