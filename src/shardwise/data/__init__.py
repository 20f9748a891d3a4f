"""This package turns text on disk into the samples of each step, which are the same for any number of ranks."""
