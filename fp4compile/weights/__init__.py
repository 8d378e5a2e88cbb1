"""Weights that are stored quantised: packed layers and experts, the files that hold them, and the weight cache."""
