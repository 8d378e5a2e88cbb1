"""Predicted times of linear layers and experts on a GPU."""
