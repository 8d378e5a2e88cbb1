"""What the numbers mean: formats, layouts of scales, groups of rows, steps, and the reference of every operation."""
