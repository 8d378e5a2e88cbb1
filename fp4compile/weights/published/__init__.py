"""Checkpoints of other tools."""
