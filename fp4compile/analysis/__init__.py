"""Reading a joint graph: which products it has, which role each has, and what the recipe makes of it."""
