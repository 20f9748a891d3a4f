"""Data: which samples make up a step, the same for any number of ranks."""

from .corpus import TextWindows, decode, open_corpus
from .loader import Batch, Loader, rank_rows
from .order import sample_order

__all__ = ["Batch", "Loader", "TextWindows", "decode", "open_corpus", "rank_rows", "sample_order"]
