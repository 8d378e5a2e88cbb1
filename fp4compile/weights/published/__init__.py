"""Checkpoints that other tools have written."""
