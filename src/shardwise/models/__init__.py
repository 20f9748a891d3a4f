"""These are small language models in plain PyTorch; they know nothing of shardwise."""

from .generate import generate
from .gpt import GPT
from .llama import Llama

__all__ = ["GPT", "Llama", "generate"]
