"""The keys of Accelerate's YAML, which ``accelerate config`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import deepspeed, fsdp
from .answers import Answer, Context, Rule, always, by_value, elsewhere, key, none, number, switch

LAUNCHER = "torchrun or srun starts several hosts; `shardwise launch` or `shardwise train` all ranks of one"
XLA = "shardwise trains on what torch's eager kernels run on"
COMPILED = "shardwise captures the model itself"


def _ranks(name: str, value: Any, context: Context) -> Answer:
    answer = number("train.devices", least=1, whole=True)(name, value, context)
    return Answer("elsewhere", LAUNCHER) if (context.hosts or 1) > 1 else answer


def _distributed(name: str, value: Any, context: Context) -> Answer:
    """Answer what Accelerate shards if no other key says so."""
    told = " ".join(context.values)
    if str(value).upper() == "FSDP" and "sharding_strategy" not in told and "reshard_after_forward" not in told:
        return fsdp.FULL
    if str(value).upper() == "DEEPSPEED" and "zero_stage" not in told and "deepspeed_config_file" not in told:
        return key("Accelerate's default", parallel_zero=2)
    return TYPES(name, value, context)


TYPES = by_value({
    **dict.fromkeys(("NO", "False"), Answer("always", "one rank")),
    **dict.fromkeys(
        ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU",
         "MULTI_NEURON", "FSDP", "DEEPSPEED", "TP", "MEGATRON_LM"),
        Answer("always", "ranks and what they shard follow from the other keys"),
    ),
    **dict.fromkeys(("XLA", "TPU"), Answer("none", XLA)),
})  # fmt: skip


RULES: Mapping[str, Rule] = {
    "compute_environment": by_value({
        "LOCAL_MACHINE": Answer("always", "a run is on the hosts that start it"),
        "AMAZON_SAGEMAKER": Answer("none", "torchrun or srun starts the hosts"),
    }),
    "distributed_type": _distributed,
    "mixed_precision": by_value({
        **dict.fromkeys(("no", "False"), key(parallel_precision="fp32")),
        "bf16": key("masters and optimizer state in fp32", parallel_precision="bf16"),
        "fp16": key("masters and optimizer state in fp32", parallel_precision="fp16"),
        "fp8": Answer("none", 'parallel.precision = "bf16" is the narrowest with a range like fp32\'s'),
    }),
    "downcast_bf16": none(XLA),
    "debug": always("ranks' steps are compared where they communicate; a hung rank is named"),
    "use_cpu": switch(Answer("elsewhere", "CUDA_VISIBLE_DEVICES= in the environment hides GPUs")),
    "num_processes": _ranks,
    "num_machines": by_value({1: Answer("always", "all ranks are on this machine")} | {
        hosts: Answer("elsewhere", LAUNCHER) for hosts in range(2, 1025)
    }),
    "machine_rank": elsewhere("torchrun --node-rank, or srun"),
    "main_process_ip": elsewhere("torchrun --rdzv-endpoint"),
    "main_process_port": elsewhere("torchrun --rdzv-endpoint"),
    "rdzv_backend": elsewhere("torchrun --rdzv-backend"),
    "same_network": elsewhere(LAUNCHER),
    "gpu_ids": elsewhere("CUDA_VISIBLE_DEVICES in the environment"),
    "main_training_function": none("`shardwise launch` runs a script as Python does"),
    "enable_cpu_affinity": always("ranks run on the cores near their GPU"),
    "deepspeed_config.deepspeed_config_file": elsewhere("a file of its own: its lines follow, if it is there"),
    "deepspeed_config.zero_stage": deepspeed.STAGES,
    "deepspeed_config.gradient_accumulation_steps": number("parallel.microbatches", least=1, whole=True),
    "deepspeed_config.gradient_clipping": number("train.clip_norm"),
    "deepspeed_config.offload_optimizer_device": deepspeed.ZERO["offload_optimizer.device"],
    "deepspeed_config.offload_param_device": deepspeed.ZERO["offload_param.device"],
    "deepspeed_config.offload_*": none(deepspeed.NO_DISK),
    "deepspeed_config.zero3_init_flag": always("`shardwise train` makes initial values without a model on any device"),
    "deepspeed_config.zero3_save_16bit_model": elsewhere("`shardwise checkpoint export --dtype bf16`"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": none("experts are found, and parallel.ep divides them"),
    "deepspeed_config.deepspeed_*": elsewhere(LAUNCHER),
    "parallelism_config.parallelism_config_dp_replicate_size": number("parallel.dp_replicate", least=1, whole=True),
    "parallelism_config.parallelism_config_dp_shard_size": lambda name, value, context: (
        Answer("always", "one rank") if value == 1 else key("parallel.dp counts all of them", parallel_zero=3)
    ),
    "parallelism_config.parallelism_config_tp_size": number("parallel.tp", least=1, whole=True),
    "parallelism_config.parallelism_config_cp_size": number("parallel.cp", least=1, whole=True),
    "parallelism_config.*": none("parallel.context says how attention joins the parts of a sequence"),
    "megatron_lm_config.megatron_lm_tp_degree": number("parallel.tp", least=1, whole=True),
    "megatron_lm_config.megatron_lm_pp_degree": number("parallel.pp", least=1, whole=True),
    "megatron_lm_config.megatron_lm_num_micro_batches": number("parallel.microbatches", least=1, whole=True),
    "megatron_lm_config.megatron_lm_gradient_clipping": number("train.clip_norm"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": switch(key(parallel_tensor="1d-sp")),
    "megatron_lm_config.megatron_lm_recompute_activations": switch(key(parallel_recompute="selective")),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": switch(key(parallel_zero=1)),
    "megatron_lm_config.*": none("models are plain PyTorch, which is captured"),
    **{f"fsdp_config.fsdp_{name}": rule for name, rule in fsdp.RULES.items()},
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": always(fsdp.UNITS),
    "dynamo_config.*": none(COMPILED),
    "fp8_config.*": none('parallel.precision = "bf16" is the narrowest with a range like fp32\'s'),
    "mpirun_config.*": elsewhere(LAUNCHER),
    "tpu_*": none(XLA),
    "command_file": none(XLA),
    "commands": none(XLA),
}  # fmt: skip
