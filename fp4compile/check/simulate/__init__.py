"""A simulator of compiled kernels: it executes the PTX of a launch on the CPU and checks every access to memory."""
