"""What kernels are compiled to, for GPUs that need not be there, and the lines that machine code must reach."""
