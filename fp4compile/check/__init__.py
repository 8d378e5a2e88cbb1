"""Checks of kernels: machine code for GPUs, local or not, and results and times on the local GPU."""
