"""Adapters of low rank (LoRA, Hu et al., 2021) beside the frozen linear layers of a model, by peft."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.checkpoint.adapters import Adapters, without_adapters
from shardwise.core.errors import ConfigError, did_you_mean

from .factories import blame
from .pretrained import PretrainedFolder
from .sections import ModelConfig
from .sections.model import ALL_LINEAR
from .toml import shown

KEY = "model.lora"


def with_adapters(model: ModelConfig, base: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes what ``base`` makes with the adapters of ``model.lora``, if that is given: they
    alone learn.

    :class:`ConfigError`, here or from the constructor, where peft is missing, where it finds no layer for the targets,
    or one that is not linear.
    """
    if model.lora is None:
        return base
    peft, settings = _peft(model), adapter_settings(model)

    def construct() -> nn.Module:
        module = base()
        _check_targets(model, module)
        with blame(KEY, model.lora):
            made: nn.Module = peft.inject_adapter_in_model(peft.LoraConfig(**settings), module)
        _check_linear(model, made)
        return made

    return construct


class UnderAdapters(Mapping[str, Tensor]):
    """The saved weights of a model, under the names that they have beside adapters: those of a layer with one are in
    its ``base_layer``.  ``names`` are those of the model with adapters."""

    def __init__(self, weights: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._weights = weights
        self._names = {name: base for name in names if (base := without_adapters(name)) in weights}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def adapters_of(model: ModelConfig, module: nn.Module) -> Adapters | None:
    """Return what is to be kept of the adapters that peft has put into ``module``; None without ``model.lora``."""
    if model.lora is None:
        return None
    config = vars(module)["peft_config"]["default"].to_dict()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    transposed = [name for name, one in module.named_modules() if getattr(one, "fan_in_fan_out", False)]
    return Adapters(
        json.loads(json.dumps(plain, default=str)), model.lora["alpha"] / model.lora["rank"], tuple(transposed)
    )


def adapter_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of peft's ``LoraConfig``."""
    assert model.lora is not None
    targets = model.lora["targets"]
    return {
        "r": model.lora["rank"],
        "lora_alpha": model.lora["alpha"],
        "lora_dropout": model.lora["dropout"],
        "target_modules": targets if targets == ALL_LINEAR else _listed(targets),
        "base_model_name_or_path": model.pretrained,
        "task_type": "CAUSAL_LM" if _writes_text(model) else None,
    }


def _listed(targets: str | tuple[str, ...]) -> list[str]:
    return [targets] if isinstance(targets, str) else list(targets)


def _writes_text(model: ModelConfig) -> bool:
    name = PretrainedFolder.open(model.pretrained).class_name if model.pretrained else str(model.transformers)
    return name.endswith(("ForCausalLM", "LMHeadModel"))


def _peft(model: ModelConfig) -> Any:
    try:
        import peft
    except ImportError as error:
        legal = "install it (pip install 'shardwise[lora]'), or leave model.lora out"
        raise ConfigError.on(f"{KEY} = {shown(model.lora)}", f"peft cannot be imported ({error})", legal) from error
    return peft


def _check_targets(model: ModelConfig, module: nn.Module) -> None:
    """Raise :class:`ConfigError` for a target that no layer has; peft says nothing where it finds another one."""
    targets = model.lora["targets"] if model.lora is not None else ALL_LINEAR
    names = {name: one for name, one in module.named_modules() if name}
    for target in () if targets == ALL_LINEAR else _listed(targets):
        if not any(f".{name}".endswith(f".{target}") for name in names):
            linear = dict.fromkeys(name.rpartition(".")[2] for name, one in names.items() if _is_linear(one))
            wrong = f'no layer has the name "{target}"'
            legal = f"{ALL_LINEAR}, {', '.join(linear)}"
            raise ConfigError.on(f"{KEY} = {shown(model.lora)}", wrong, legal, f".{did_you_mean(target, linear)}")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's, which has its own


def _check_linear(model: ModelConfig, module: nn.Module) -> None:
    """Raise :class:`ConfigError` if peft has put an adapter beside a layer that is not linear."""
    from peft.tuners.lora import Linear, LoraLayer

    other = [name for name, one in module.named_modules() if isinstance(one, LoraLayer) and not isinstance(one, Linear)]
    if other:
        wrong = f"{other[0]} is no linear layer"
        raise ConfigError.on(f"{KEY} = {shown(model.lora)}", wrong, "the names of linear layers as targets")
