"""Reading a joint graph: its matmuls, the role of each, and the recipe's decision about each."""
