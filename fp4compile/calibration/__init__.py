"""Measurements on a user's batches: static scales, the sensitivity of layers, and block scales of least error."""
