"""The zoo of peft: four methods on three bases of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sweeping.case import WORDS, Case, Draws, Entry, batches
from sweeping.torchvision_ops import ready

BASES: dict[str, tuple[str, list[str], list[str]]] = {
    "llama": ("CAUSAL_LM", ["q_proj", "v_proj", "down_proj"], ["down_proj"]),
    "gpt2": ("CAUSAL_LM", ["c_attn", "c_proj"], ["c_proj"]),
    "t5": ("SEQ_2_SEQ_LM", ["q", "v", "wo"], ["wo"]),
}
"""The bases, with their task, the layers that adapters are at, and the feed-forward ones among these."""
METHODS = ("lora", "dora", "ia3", "prompt")


def entries() -> Iterator[Entry]:
    """Return each method on each base; :class:`ImportError` where peft is not installed."""
    with contextlib.suppress(ImportError):  # without it, transformers does not ask for it
        ready()
    import peft  # noqa: F401

    for base in BASES:
        for method in METHODS:
            yield Entry("peft", base, method, lambda b=base, m=method: adapted(b, m))


def adapted(base: str, method: str) -> Case:
    """Return a base with adapters, of which half of LoRA's are not zero, so that all have gradients."""
    import peft
    import transformers as t

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0}
    llama = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    models: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama, num_key_value_heads=2, **sizes)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **sizes)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **sizes)
        ),
    }
    task, layers, forward = BASES[base]
    of = {"gpt2": {"fan_in_fan_out": True}}.get(base, {})
    config: Any
    if method in ("lora", "dora"):
        config = peft.LoraConfig(r=4, target_modules=layers, use_dora=method == "dora", task_type=task, **of)
    elif method == "ia3":
        config = peft.IA3Config(target_modules=layers, feedforward_modules=forward, task_type=task, **of)
    else:
        config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type=task)
    module = peft.get_peft_model(models[base](), config).float().train()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    def batch(draws: Draws) -> dict[str, torch.Tensor]:
        mask = draws.padding(12)
        ids = draws.integers(3, WORDS, 12).masked_fill(mask == 0, 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": draws.targets(WORDS, 12, mask)}

    return Case(module, batches(batch))
