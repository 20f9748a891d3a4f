"""What each of transformers' ``TrainingArguments`` becomes: most act as they do there, some become parts of a plan,
some have no effect, and some are refused. An argument that is in no table here is refused where it is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan

AS_THERE = frozenset(
    [
        "output_dir",
        "per_device_train_batch_size",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "warmup_ratio",
        "optim",
        "optim_args",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "label_smoothing_factor",
        "bf16",
        "fp16",
        "activation_checkpointing",
        "gradient_checkpointing",
        "use_cache",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_on_start",
        "include_for_metrics",
        "save_only_model",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "full_determinism",
        "seed",
        "data_seed",
        "use_cpu",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
        "label_names",
        "do_train",
        "do_eval",
        "do_predict",
        "resume_from_checkpoint",
        "local_rank",
        "tf32",
        "ddp_backend",
        "ddp_timeout",
        "logging_dir",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "length_column_name",
    ]
)
"""These have the meaning that they have in transformers. Those of the hub act in ``push_to_hub()``."""

NOTED: Mapping[str, str] = {
    "logging_nan_inf_filter": "a step that is not finite ends the run, or under fp16 is skipped",
    "torch_empty_cache_steps": "the engine's memory is allocated once",
    "eval_accumulation_steps": "predictions go to the host after every batch",
    "eval_use_gather_object": "predictions are gathered as tensors",
    "log_on_each_node": "rank 0 of all hosts logs",
    "skip_memory_metrics": "memory is measured by `shardwise memory`",
    "activation_checkpointing_kwargs": "a unit is computed again as a whole: plan=Plan.of(recompute=...)",
    "gradient_checkpointing_kwargs": "a unit is computed again as a whole: plan=Plan.of(recompute=...)",
    "ddp_find_unused_parameters": "there is no DistributedDataParallel; gradients that nothing reaches are zero",
    "ddp_bucket_cap_mb": "there is no DistributedDataParallel; a unit's parameters are one bucket",
    "ddp_broadcast_buffers": "there is no DistributedDataParallel; buffers are those of one device",
    "ddp_static_graph": "there is no DistributedDataParallel; the graph is captured once",
}
"""These have no effect here; where one is set, a note says why."""

REFUSED: Mapping[str, str] = {
    "average_tokens_across_devices": "True, for a loss is always the mean over the targets of the whole batch",
    "neftune_noise_alpha": "None, for hooks on modules are not captured",
    "use_liger_kernel": "False",
    "liger_kernel_config": "None",
    "torch_compile": "False, for shardwise captures the model itself",
    "torch_compile_backend": "None",
    "torch_compile_mode": "None",
    "auto_find_batch_size": "False; `shardwise memory` predicts what fits",
    "optim_target_modules": "None, for optimizers over parts of matrices are not in shardwise",
    "fp16_full_eval": "False, for evaluations compute in the precision that trains",
    "bf16_full_eval": "False, for evaluations compute in the precision that trains",
    "include_num_input_tokens_seen": '"no"',
    "batch_eval_metrics": "False; compute_metrics gets all predictions at once",
    "eval_do_concat_batches": "True",
    "save_on_each_node": "False, for output_dir is a folder that all hosts share",
    "enable_jit_checkpoint": "False",
    "push_to_hub": "False, and trainer.push_to_hub() after train()",
    "accelerator_config": "its defaults: batches are divided by the plan, in an order that follows from the seed",
    "parallelism_config": "None, and plan=Plan.of(Mesh.of(tp=...)) of ShardwiseTrainer",
    "train_sampling_strategy": '"random" or "sequential", for all batches are padded to one length',
    "fsdp": "none, and plan=data_parallel(Plan.of(), ranks, zero=3) of ShardwiseTrainer; `shardwise convert` says what "
    "each of its arguments becomes",
    "fsdp_config": "none, and the plan of ShardwiseTrainer; `shardwise convert` says what each of its keys becomes",
    "deepspeed": "none, and the plan of ShardwiseTrainer; `shardwise convert` says what each of its keys becomes",
    "debug": "none; a step that is not finite names the unit",
}
"""These are refused where they are set to something else."""

NESTED_DEFAULTS = {"split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True}
LEGAL = {"train_sampling_strategy": ("random", "sequential")}


def check_arguments(args: TrainingArguments) -> list[str]:
    """Return notes on arguments that have no effect; raise :class:`ConfigError` on one that is refused or not known."""
    notes = []
    for field in fields(args):
        name, value = field.name, getattr(args, field.name)
        if name in AS_THERE or name in LEGAL and value in LEGAL[name] or not _set(field, value):
            continue
        if name in NOTED:
            notes.append(f"TrainingArguments.{name} = {value!r} has no effect: {NOTED[name]}")
            continue
        shown = value if isinstance(value, str | int | float | bool | list) else type(value).__name__
        wrong = f"{shown!r} is not supported" if name in REFUSED else f"{shown!r}: this argument is not known here"
        raise ConfigError.on(f"TrainingArguments.{name}", wrong, REFUSED.get(name, "its default"))
    if args.use_cpu and torch.accelerator.is_available():
        legal = "False, or CUDA_VISIBLE_DEVICES= in the environment, by which torch sees no GPU"
        raise ConfigError.on(
            "TrainingArguments.use_cpu", "True, but torch sees a GPU, on which shardwise trains", legal
        )
    return notes


def _set(field: Field[Any], value: Any) -> bool:
    """Return whether an argument differs from its default, as ``TrainingArguments`` normalises it."""
    if field.name == "accelerator_config":
        return any(getattr(value, key, default) != default for key, default in NESTED_DEFAULTS.items())
    if field.name == "fsdp_config":
        return bool(value) and bool({key: one for key, one in value.items() if one} - {"min_num_params": 0}.items())
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    same = value == default or (not value and not default)
    return not same and str(getattr(value, "value", value)) != str(default)


def plan_of(args: TrainingArguments, plan: Plan | None, model: nn.Module) -> Plan:
    """Return the plan of a training: by default data parallel over all ranks, with a microbatch for each accumulation;
    in the precision that the arguments ask for, else in fp32, or in fp64 for a model of doubles.

    Raises :class:`ConfigError` where ``plan`` and ``args`` ask for different things."""
    accumulated = args.gradient_accumulation_steps
    if plan is None:
        plan = Plan.of(Mesh.of(dp=args.world_size))
    elif plan.mesh.size != args.world_size:
        legal = (
            f"a mesh of {args.world_size}, the processes; `shardwise launch --ranks {plan.mesh.size}` starts as many"
        )
        raise ConfigError.on("plan", f"its mesh {plan.mesh.shape} has {plan.mesh.size} ranks", legal)
    if accumulated > 1 and plan.microbatches not in (1, accumulated):
        wrong = f"{accumulated}, but the plan has {plan.microbatches} microbatches"
        raise ConfigError.on("TrainingArguments.gradient_accumulation_steps", wrong, f"1, or {plan.microbatches}")
    wanted = "bf16" if args.bf16 else "fp16" if args.fp16 else plan.numeric.precision
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if wanted == "fp32" and dtypes == {torch.float64}:
        wanted = "fp64"
    if wanted == "fp32" and dtypes == {torch.bfloat16}:
        wanted = "bf16"  # the model computes in it in transformers, too; shardwise keeps masters in fp32
    if plan.numeric.precision not in ("fp32", wanted):
        wrong = f'"{plan.numeric.precision}", but TrainingArguments ask for "{wanted}"'
        raise ConfigError.on("plan.precision", wrong, f'"{wanted}"')
    recompute = "full" if args.activation_checkpointing and plan.memory.recompute == "none" else plan.memory.recompute
    return plan.replace(microbatches=max(accumulated, plan.microbatches), precision=wanted, recompute=recompute)
