"""The meaning of the numbers: formats, scale layouts, groups of rows, steps, and the reference of every operation."""
