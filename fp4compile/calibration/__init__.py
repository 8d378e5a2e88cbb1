"""Packing, and measurements on a user's batches: static scales, sensitivity of layers, second moments of inputs."""
