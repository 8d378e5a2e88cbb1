"""The functional op set: the language between the graph passes and the kernels."""
