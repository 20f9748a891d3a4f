"""Write samples of text with the weights of a run, where its model and its data can."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.initial.values import Values
from shardwise.models import generate

from .ready import Ready

SAMPLE_TOKENS = 400
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Sampler:
    """This writes samples for ``run``."""

    run: Ready

    @property
    def able(self) -> bool:
        """Return whether the model is one of shardwise's own, trained on text, so that it can write a sample."""
        data = self.run.data
        return data.decode is not None and data.encode is not None and self.run.config.model.name is not None

    def text(self, state: Mapping[str, Tensor]) -> str:
        """Return the prompt of samples and what the model with the whole ``state`` writes after it."""
        run = self.run
        assert run.data.decode is not None and run.data.encode is not None
        module = Values.of_mapping(run.module, state).whole()
        given = run.config.train.sample_prompt
        prompt = run.data.prompt if given is None else run.data.encode(given)
        return sample_text(module.to(self._roomy()), prompt, run.data.decode, run.config.train.seed)

    def _roomy(self) -> torch.device:
        """Return the device if the whole model fits there into the memory that training has taken, else the CPU."""
        trainer = self.run.trainer
        device = trainer.comm.device
        backend, described = Backend.of(device), trainer.engine.whole.describe().values()
        needed = sum(math.prod(one.shape) * one.dtype.itemsize for one in described)
        room = backend.most_allocated(device) - backend.allocated(device) if backend.asynchronous else needed
        return device if needed <= room else torch.device("cpu")


def sample_text(module: nn.Module, prompt: Sequence[int], decode: Callable[[Any], str], seed: int) -> str:
    """Return ``prompt`` and the text that a language model writes after these tokens."""
    device = next(module.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    found = generate(module, ids, SAMPLE_TOKENS, TEMPERATURE, generator)
    return decode(found[0].tolist())
