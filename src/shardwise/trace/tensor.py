"""Tensor parallelism: to be."""
