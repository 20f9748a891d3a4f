"""The keys of DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json), by dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.optim import CHOICES
from shardwise.core.optimizers import OPTIMIZERS

from .answers import Answer, Context, Rule, always, by_value, checked, elsewhere, key, none, number, switch
from .fsdp import OFFLOADED, dtype_of

BUCKETS = "the parameters of a unit are one bucket; what does not fit is said before the start"
SUMS = "gradients are means over the batch, summed once; parallel.reduce says in which dtype"
SCALING = "a dynamic loss scale is halved by an overflow and doubled after 2000 steps without one"
PARAMETERS_THERE = 'parameters stay on the device; parallel.zero = 3 and parallel.offload = "optimizer" save most'
MICRO, WHOLE, ACCUMULATED = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
QUANTISED = "values are communicated in the dtype that computes, or in parallel.reduce"


def _micro(name: str, value: Any, context: Context) -> Answer:
    value = checked(name, value, least=1, whole=True)
    if context.number(WHOLE) is not None:
        return Answer("key", f"it follows from {WHOLE}, the ranks and parallel.microbatches")
    times = context.number(ACCUMULATED) or 1
    if context.ranks is None:
        return Answer(
            "elsewhere", f"data.batch_size = {value * times} x the data-parallel ranks; --ranks says how many"
        )
    total = value * times * context.ranks
    return Answer("key", f"{value} x {times} microbatches x {context.ranks} ranks", {"data.batch_size": total})


def _optimizer(name: str, value: Any, context: Context) -> Answer:
    word = str(value).lower()
    params = "optimizer.params."
    if word in ("adam", "fusedadam", "deepspeedcpuadam"):
        decoupled = context.values.get(f"{params}adam_w_mode", True)
        why = "DeepSpeed's Adam decouples weight decay unless adam_w_mode is false"
        return Answer("key", why, {"optimizer.name": "adamw" if decoupled else "adam"})
    if word in OPTIMIZERS and OPTIMIZERS[word].whole is not None:
        return Answer("none", f"optimizer.name has {word} as torch or its paper defines it, DeepSpeed another")
    if word in CHOICES["name"]:
        return Answer("key", "", {"optimizer.name": word})
    return Answer("none", f"legal in optimizer.name: {', '.join(CHOICES['name'])}")


def _pair(name: str, value: Any, context: Context) -> Answer:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError.on(name, f"{value!r} is not legal", "two numbers from 0 to below 1")
    return Answer("key", "", {"optimizer.betas": list(value)})


def _eps(name: str, value: Any, context: Context) -> Answer:
    if checked(name, value) == 1e-8:
        return Answer("always", "torch's default")
    return Answer("key", "", {"optimizer.eps": checked(name, value)})


def _warm(name: str, value: Any, context: Context) -> Answer:
    if checked(name, value) == 0:
        return Answer("always", "learning rates rise from 0")
    return Answer("none", "learning rates rise from 0")


def _schedule(name: str, value: Any, context: Context) -> Answer:
    least = context.values.get("scheduler.params.cos_min_ratio", 1e-4)
    return by_value({
        "WarmupLR": key("a linear warm-up", optimizer_schedule="constant"),
        "WarmupDecayLR": key("it falls to 0", optimizer_schedule="linear", optimizer_min_lr_ratio=0.0),
        "WarmupCosineLR": key(
            "it falls to cos_min_ratio of optimizer.lr", optimizer_schedule="cosine",
            optimizer_min_lr_ratio=checked("scheduler.params.cos_min_ratio", least),
        ),
        "OneCycle": Answer("none", 'optimizer.schedule = "one_cycle" is torch\'s, which has other options'),
        "LRRangeTest": Answer("none", "no schedule searches for a learning rate"),
    })(name, value, context)  # fmt: skip


def _loss_scale(name: str, value: Any, context: Context) -> Answer:
    if not context.values.get("fp16.enabled"):
        return Answer("always", "there is no loss scale without fp16")
    return Answer("key", "", {"train.loss_scale": checked(name, value) or "dynamic"})


def _mics(name: str, value: Any, context: Context) -> Answer:
    if not isinstance(value, int) or value < 1:
        return Answer("always", "off, as by default")
    if context.ranks is None or context.ranks % value:
        return Answer("elsewhere", f"parallel.dp_replicate = the ranks / {value}; --ranks says how many")
    return Answer("key", "groups of ranks have all shards", {"parallel.dp_replicate": context.ranks // value})


def _device(on_host: Answer, on_disk: str) -> Rule:
    return by_value({"cpu": on_host, "nvme": Answer("none", on_disk), "none": Answer("always", "off, as by default")})


STAGES = by_value({
    0: key("nothing is sharded", parallel_zero=0),
    1: key("the optimizer's state is sharded", parallel_zero=1),
    2: key("optimizer state and gradients are sharded", parallel_zero=2),
    3: key("optimizer state, gradients and parameters are sharded", parallel_zero=3),
})  # fmt: skip
AHEAD = "parallel.prefetch counts units; by default what hides gathers, if it fits"
STAY = "parallel.gathered says how long parameters stay; by default as they fit"
NO_DISK = 'nothing is kept on a disk; parallel.offload = "optimizer" keeps it in the host\'s memory'
ZERO: Mapping[str, Rule] = {
    "stage": STAGES,
    "offload_optimizer.device": _device(OFFLOADED, NO_DISK),
    "offload_optimizer.pin_memory": always("memory of transfers is pinned"),
    "offload_optimizer.*": none("the host takes the whole step, bucket by bucket"),
    "offload_param.device": _device(Answer("none", PARAMETERS_THERE), PARAMETERS_THERE),
    "offload_param.*": none(PARAMETERS_THERE),
    "overlap_comm": always("communication overlaps with computation"),
    "contiguous_gradients": always("gradients are in flat buffers"),
    "reduce_scatter": always("gradients go to their shards by reduce-scatter"),
    "allgather_partitions": always("parameters are gathered by all-gather"),
    "reduce_bucket_size": always(BUCKETS),
    "allgather_bucket_size": always(BUCKETS),
    "sub_group_size": always(BUCKETS),
    "round_robin_gradients": always(BUCKETS),
    "stage3_prefetch_bucket_size": elsewhere(AHEAD),
    "prefetch_bucket_size": elsewhere(AHEAD),
    "stage3_max_live_parameters": elsewhere(STAY),
    "max_live_parameters": elsewhere(STAY),
    "stage3_max_reuse_distance": elsewhere(STAY),
    "max_reuse_distance": elsewhere(STAY),
    "stage3_param_persistence_threshold": always("small parameters are gathered with the others of their unit"),
    "param_persistence_threshold": always("small parameters are gathered with the others of their unit"),
    "stage3_gather_16bit_weights_on_model_save": elsewhere("`shardwise checkpoint export --dtype bf16`"),
    "gather_16bit_weights_on_model_save": elsewhere("`shardwise checkpoint export --dtype bf16`"),
    "stage3_module_granularity_threshold": always(BUCKETS),
    "stage3_use_all_reduce_for_fetch_params": always("parameters are gathered by all-gather"),
    "elastic_checkpoint": always("a checkpoint resumes on any number of ranks"),
    "load_from_fp32_weights": always("checkpoints have the masters"),
    "ignore_unused_parameters": always("the gradient of a parameter that nothing reaches is zero"),
    "legacy_stage1": always("there is one stage 1"),
    "use_all_reduce_for_fetch_params": always("parameters are gathered by all-gather"),
    "mics_shard_size": _mics,
    "mics_hierarchical_params_gather": none("gathers have one level"),
    "zero_hpz_partition_size": none("backward gathers over the same ranks as forward; parallel.dp_replicate"),
    "zero_quantized_weights": none(QUANTISED),
    "zero_quantized_gradients": none(QUANTISED),
    "zero_quantized_nontrainable_weights": none(QUANTISED),
    "memory_efficient_linear": always("weight gradients are multiplied straight into their buffers"),
    "pipeline_loading_checkpoint": always("a rank reads its part of a checkpoint alone"),
    "override_module_apply": always("`shardwise train` makes initial values without a model on any device"),
    "log_trace_cache_warnings": none("the order of gathers is known before the first step"),
}  # fmt: skip


def _logger(name: str, value: Any, context: Context) -> Answer:
    """Answer ``enabled`` of a logger, with all that are enabled."""
    loggers = [
        one for one in ("tensorboard", "wandb") if name.startswith(one) or context.values.get(f"{one}.enabled") is True
    ]
    return switch(key(train_loggers=loggers))(name, value, context)


RULES: Mapping[str, Rule] = {
    WHOLE: number("data.batch_size", "the rows of a step, over all ranks and microbatches", least=1, whole=True),
    MICRO: _micro,
    ACCUMULATED: number("parallel.microbatches", least=1, whole=True),
    "gradient_clipping": number("train.clip_norm"),
    "optimizer.type": _optimizer,
    "optimizer.legacy_fusion": none("kernels are torch's"),
    "optimizer.params.lr": number("optimizer.lr"),
    "optimizer.params.betas": _pair,
    "optimizer.params.eps": _eps,
    "optimizer.params.weight_decay": number("optimizer.weight_decay", "norms and biases have none"),
    "optimizer.params.torch_adam": always("optimizers are torch's"),
    "optimizer.params.adam_w_mode": always("it decides on optimizer.name"),
    "optimizer.params.momentum": number("optimizer.momentum"),
    "optimizer.params.nesterov": switch(key(optimizer_nesterov=True)),
    "optimizer.params.amsgrad": switch(key(optimizer_amsgrad=True)),
    "optimizer.params.*": none("a config has torch's default; in Python OptimizerChoice(...) has further options"),
    "scheduler.type": _schedule,
    "scheduler.params.warmup_num_steps": number("optimizer.warmup_steps", whole=True),
    "scheduler.params.total_num_steps": number("train.steps", least=1, whole=True),
    "scheduler.params.cos_min_ratio": always("it decides on optimizer.min_lr_ratio"),
    "scheduler.params.warmup_max_lr": number("optimizer.lr"),
    "scheduler.params.warmup_min_lr": _warm,
    "scheduler.params.warmup_min_ratio": _warm,
    "scheduler.params.warmup_type": by_value({
        "linear": Answer("always", "learning rates rise linearly"),
        "log": Answer("none", "learning rates rise linearly"),
    }),
    "scheduler.params.*": none("optimizer.schedule has no such option"),
    "bf16.enabled": switch(key("masters and optimizer state in fp32", parallel_precision="bf16")),
    "bfloat16.enabled": switch(key("masters and optimizer state in fp32", parallel_precision="bf16")),
    "bf16.*": always("masters and sums of gradients are in fp32"),
    "fp16.enabled": switch(key("masters and optimizer state in fp32", parallel_precision="fp16")),
    "fp16.loss_scale": _loss_scale,
    "fp16.initial_scale_power": none(SCALING),
    "fp16.loss_scale_window": none(SCALING),
    "fp16.hysteresis": none(SCALING),
    "fp16.consecutive_hysteresis": none(SCALING),
    "fp16.min_loss_scale": none(SCALING),
    "fp16.auto_cast": always("fields of a batch get the dtype that computes"),
    "fp16.*": always("masters are in fp32"),
    "amp.*": none('parallel.precision = "bf16" or "fp16" is what there is'),
    "torch_autocast.enabled": none('parallel.precision = "bf16" or "fp16" is what there is'),
    "torch_autocast.*": none('parallel.precision = "bf16" or "fp16" is what there is'),
    "zero_optimization": switch(key(parallel_zero=1)),
    **{f"zero_optimization.{name}": rule for name, rule in ZERO.items()},
    "zero_allow_untested_optimizer": always("all of optimizer.name are tested with all stages"),
    "zero_force_ds_cpu_optimizer": always("the host's step is torch's"),
    "communication_data_type": dtype_of("parallel.reduce"),
    "fp32_allreduce": switch(key(parallel_reduce="fp32")),
    "data_types.grad_accum_dtype": by_value({
        "fp32": Answer("always", "gradients are kept in fp32"),
        "bf16": Answer("none", "gradients are kept in fp32"),
        "fp16": Answer("none", "gradients are kept in fp32"),
    }),
    "prescale_gradients": always(SUMS),
    "gradient_predivide_factor": always(SUMS),
    "sparse_gradients": elsewhere(
        "parallel.sparse_gradients: rows alone travel of nn.Embedding(sparse=True) where the optimizer allows it"
    ),
    "seq_parallel_communication_data_type": none(QUANTISED),
    "sequence_parallel_size": number("parallel.cp", least=1, whole=True),
    "tensor_parallel.autotp_size": number("parallel.tp", "any layer's sharding follows from the graph", whole=True),
    "tensor_parallel.*": always("how layers are sharded follows from the graph, or parallel.pins"),
    "pipeline.*": elsewhere("parallel.pp, parallel.schedule, parallel.stages: any model that can be captured is cut"),
    "activation_checkpointing.cpu_checkpointing": switch(
        key("on GPUs: what autograd keeps is on the host until backward", parallel_offload="activations")
    ),
    "activation_checkpointing.*": elsewhere('parallel.recompute = "full", if the model was checkpointed'),
    "steps_per_print": always("a run shows every step"),
    "wall_clock_breakdown": elsewhere("train.trace_steps records what each rank did when; `shardwise draw RUN_DIR`"),
    "dump_state": elsewhere("`shardwise config` shows the resolved config, `shardwise show` the program"),
    "memory_breakdown": elsewhere("`shardwise memory` predicts and shows memory by category"),
    "flops_profiler.*": elsewhere("`shardwise show` has the FLOPs of each unit"),
    "comms_logger.*": elsewhere("`shardwise show` lists what is communicated, and by which op"),
    "tensorboard.enabled": _logger,
    "tensorboard.*": elsewhere("curves are in train.run_dir"),
    "csv_monitor.*": always("metrics.jsonl in train.run_dir has the curves"),
    "wandb.enabled": _logger,
    "wandb.*": elsewhere("wandb reads its environment: WANDB_PROJECT, WANDB_ENTITY"),
    "comet.*": none("metrics.jsonl in train.run_dir has the curves"),
    "autotuning.*": elsewhere('`shardwise memory` predicts what fits; parallel.tensor_plan = "auto" searches'),
    "elasticity.*": always("a checkpoint resumes on any number of ranks; train.max_restarts"),
    "checkpoint.*": always("checkpoints are written in the background, by all ranks"),
    "nebula.*": always("checkpoints are written in the background, by all ranks"),
    "load_universal_checkpoint": always("a checkpoint resumes on any number of ranks"),
    "aio.*": none("nothing is kept on a disk"),
    "compression_training.*": none("weights are neither quantised nor pruned"),
    "data_efficiency.*": none("data.mix weighs sources; there is no curriculum"),
    "curriculum_learning.*": none("data.mix weighs sources; there is no curriculum"),
    "progressive_layer_drop.*": none("all layers are trained"),
    "sparse_attention.*": none('data.attention = "document" is what there is'),
    "eigenvalue.*": none("there is no such analysis"),
    "disable_allgather": none("parameters are gathered by all-gather"),
    "communication_backend_name": always("NCCL between GPUs, else gloo or shared memory"),
    "dataloader_drop_last": none("an epoch's last batch has the rows that are left"),
    "graph_harvesting": none("there are no CUDA graphs"),
    "use_data_before_expert_parallel": none("experts are found, and parallel.ep divides them"),
    "hybrid_engine.*": none("shardwise trains; it does not serve"),
    "compile.*": none("shardwise captures the model itself"),
}  # fmt: skip
