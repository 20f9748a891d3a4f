"""The arguments of PyTorch's FSDP, as Accelerate's ``fsdp_config`` and transformers' ``fsdp`` and ``fsdp_config`` name
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.core.errors import ConfigError

from .answers import Answer, Context, Rule, always, by_value, elsewhere, key, none, switch

UNITS = "a model is cut at its repeated blocks, which are found in its graph; `shardwise show` lists them"
FULL = key("optimizer state, gradients and parameters are sharded", parallel_zero=3)
KEPT = key("parameters stay gathered from forward to backward", parallel_zero=3, parallel_gathered="forward")
WORDS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")


def _hybrid(answer: Answer) -> Rule:
    def rule(name: str, value: Any, context: Context) -> Answer:
        if context.hosts is None or context.hosts < 2:
            why = f"{answer.why}; set parallel.dp_replicate to the number of hosts, of which each has all shards"
            return Answer("key", why, answer.settings)
        return Answer("key", answer.why, {**answer.settings, "parallel.dp_replicate": context.hosts})

    return rule


STRATEGIES: Mapping[str, Rule] = {
    **dict.fromkeys(("full_shard", "1", "true"), lambda *_: FULL),
    **dict.fromkeys(("shard_grad_op", "2", "false"), lambda *_: KEPT),
    **dict.fromkeys(("no_shard", "3"), lambda *_: key("every rank holds everything", parallel_zero=0)),
    **dict.fromkeys(("hybrid_shard", "4"), _hybrid(FULL)),
    **dict.fromkeys(("hybrid_shard_zero2", "5"), _hybrid(KEPT)),
}


def strategy(name: str, value: Any, context: Context) -> Answer:
    """Answer ``sharding_strategy`` and ``reshard_after_forward``, which name the same."""
    rule = STRATEGIES.get(str(value).lower())
    if rule is None:
        legal = "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or their numbers 1 to 5"
        raise ConfigError.on(name, f"{value!r} is not legal", legal)
    return rule(name, value, context)


def words(name: str, value: Any, context: Context) -> Answer:
    """Answer transformers' ``fsdp``: several words, or true for full sharding."""
    given = ["full_shard"] if value is True else str(value or "").replace(",", " ").split()
    settings: dict[str, Any] = {}
    why = []
    for word in given:
        if word not in WORDS:
            raise ConfigError.on(name, f"{word!r} is not legal", ", ".join(WORDS))
        found = (
            OFFLOADED if word == "offload" else Answer("always", UNITS) if word == "auto_wrap"
            else strategy(name, word, context)
        )  # fmt: skip
        settings |= found.settings
        why.append(found.why)
    return Answer("key" if settings else "always", "; ".join(filter(None, why)) or "off, as by default", settings)


OFFLOADED = key(
    "masters and optimizer state are on the host, which takes the step; parameters that compute stay on the device",
    parallel_offload="optimizer",
)
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def dtype_of(option: str) -> Rule:
    """Return a rule for a dtype, which is the value of an option."""
    return by_value({name: Answer("key", "", {option: short}) for name, short in DTYPES.items()})


RULES: Mapping[str, Rule] = {
    "fsdp": words,
    "sharding_strategy": strategy,
    "reshard_after_forward": strategy,
    "version": always("there is one way of sharding"),
    "offload_params": switch(OFFLOADED),
    "cpu_offload": switch(OFFLOADED),
    "backward_prefetch": by_value(
        {
            "BACKWARD_PRE": Answer("always", "parameters are gathered before they are used: parallel.prefetch"),
            "BACKWARD_POST": key("each unit's parameters are gathered when it is their turn", parallel_prefetch=0),
            "NO_PREFETCH": key(parallel_prefetch=0),
            "None": key(parallel_prefetch=0),
        }
    ),
    "forward_prefetch": switch(
        Answer("always", "parameters are gathered before they are used: parallel.prefetch"),
        Answer("always", "gathered ahead in forward as in backward: parallel.prefetch"),
    ),
    "limit_all_gathers": always("a program's memory is planned; parallel.prefetch says how far ahead gathers are"),
    "auto_wrap_policy": always(UNITS),
    "transformer_layer_cls_to_wrap": always(UNITS),
    "transformer_cls_names_to_wrap": always(UNITS),
    "min_num_params": always(UNITS),
    "use_orig_params": always("optimizers see the model's own parameters"),
    "sync_module_states": always("all ranks begin with the same values"),
    "cpu_ram_efficient_loading": always("`shardwise train` reads or makes one tensor at a time on each rank"),
    "state_dict_type": elsewhere(
        "a checkpoint is pieces of all ranks, for any number of ranks; `shardwise checkpoint export` joins them"
    ),
    "activation_checkpointing": switch(key(parallel_recompute="full")),
    "activation_checkpointing_offload": switch(key("on GPUs", parallel_offload="activations")),
    "mixed_precision_policy.param_dtype": dtype_of("parallel.precision"),
    "mixed_precision_policy.reduce_dtype": dtype_of("parallel.reduce"),
    "mixed_precision_policy.*": none("buffers and outputs have the dtypes that the model gives them"),
    "mixed_precision.param_dtype": dtype_of("parallel.precision"),
    "mixed_precision.reduce_dtype": dtype_of("parallel.reduce"),
    "mixed_precision.*": none("buffers and outputs have the dtypes that the model gives them"),
    "ignored_modules": none("all parameters are sharded alike"),
    "param_init_fn": always("`shardwise train` makes initial values without a model on any device"),
    "xla": none("shardwise trains on what torch's eager kernels run on"),
    "xla_*": none("shardwise trains on what torch's eager kernels run on"),
}
