"""Defaults that follow from other keys, and checks for values that do not go together."""

from __future__ import annotations

import math
import os

from shardwise.core.errors import ConfigError, divisors
from shardwise.core.optim import decay_steps
from shardwise.core.optimizers import APPLIES
from shardwise.core.pipeline_options import PipelineOptions
from shardwise.core.plan import check_asynchronous
from shardwise.core.schedules import AUTO, SCHEDULES
from shardwise.core.server_options import APART
from shardwise.core.tensor_options import TensorOptions
from shardwise.core.timetable import rank_of_stage, read
from shardwise.data.tokenizer import BYTE_VOCABULARY, BYTES
from shardwise.models.llama import swiglu_hidden
from shardwise.parallel.schedule import check_schedule
from shardwise.parallel.tensor import ROLES, sides

from .data import complete_data
from .draft import ConfigDraft
from .files import file_exists, there
from .hardware import MORE_RANKS, Hardware
from .pretrained import pretrained_there
from .sections import rules
from .servers import check_islands, check_servers, serves
from .train import complete_train, count_epochs
from .validation import complete_validation

KINDS = ("model.name", "model.factory", "model.transformers", "model.pretrained")
SAME_ROWS = ("parallel.pp", "parallel.ep", "parallel.cp", "parallel.tp")
"""The keys with numbers of ranks that read the same rows: those of a pipeline, and those that share a layer."""
SIZES = ("vocabulary", "width", "layers", "heads", "hidden", "context")
EXPERTS = {
    "experts": "experts", "experts_per_token": "top_k", "shared_experts": "shared",
    "capacity_factor": "capacity_factor", "balance": "balance", "balance_weight": "balance_weight",
    "z_weight": "z_weight", "bias_rate": "bias_rate",
}  # fmt: skip
"""The keys of a model with experts, and the arguments of ``shardwise.nn.MoE`` that they are."""
KEYS_OF_KIND = {
    "gpt": (*SIZES, "dropout", *EXPERTS),
    "llama": (*SIZES, "kv_heads", "tied", *EXPERTS),
    "model.factory": ("arguments",),
    "model.transformers": ("config", "lora"),
    "model.pretrained": ("config", "lora"),
}


def complete(draft: ConfigDraft, hardware: Hardware, samples: int | None = None) -> None:
    """Fill in the draft's defaults, and refuse all values that do not go together.

    ``samples`` is the number of training samples, where it is known: then ``train.steps`` replaces ``train.epochs``.
    """
    vocabulary = complete_data(draft)
    count_epochs(draft, samples)
    _model(draft, vocabulary)
    for step in (_optimizer, _loss_scale, _tf32, complete_train, complete_validation, _checkpoint, _mesh, _tensor):
        step(draft)
    _devices(draft, hardware)
    _batch(draft)


def _model(draft: ConfigDraft, vocabulary: int | None) -> None:
    kinds = [key for key in KINDS if draft.given(key)]
    if len(kinds) > 1:
        draft.refuse(kinds[1], f"one of {', '.join(KINDS)}; {kinds[0]} is there as well")
        return
    if not kinds:
        draft.default("model.name", "gpt")
    kind = kinds[0] if kinds else "model.name"
    file_exists(draft, "model.factory")
    file_exists(draft, "model.loss")
    if draft.sound("model.weights") and draft["model.weights"] and not there(draft["model.weights"], os.path.exists):
        draft.refuse("model.weights", rules("model")["weights"].legal, f"{draft['model.weights']} does not exist")
    pretrained_there(draft)
    if draft.sound(kind):
        kind = draft["model.name"] if kind == "model.name" else kind
        _foreign_keys(draft, kind)
        if kind in ("gpt", "llama"):
            _sizes(draft, kind, vocabulary)
            _experts(draft)


def _foreign_keys(draft: ConfigDraft, kind: str) -> None:
    """Refuse the keys of other kinds of model, for they would be ignored."""
    for name in dict.fromkeys(name for names in KEYS_OF_KIND.values() for name in names):
        key = f"model.{name}"
        if name not in KEYS_OF_KIND[kind] and draft.given(key) and draft.sound(key):
            owners = [owner for owner, names in KEYS_OF_KIND.items() if name in names]
            words = [owner if "." in owner else f'model.name = "{owner}"' for owner in owners]
            hint = "Its own sizes go in [model.config]" if "config" in KEYS_OF_KIND[kind] else ""
            draft.refuse(key, f"left out, for it belongs to {' and '.join(words)}", hint)


def _sizes(draft: ConfigDraft, kind: str, vocabulary: int | None) -> None:
    """Fill in and check the sizes of an own model; ``vocabulary`` is that of its text, or None for other data."""
    length = draft["data.sequence_length"]
    sizes = {"vocabulary": vocabulary or BYTE_VOCABULARY, "width": 192, "layers": 4, "heads": 6, "context": length}
    for name, value in sizes.items():
        draft.default(f"model.{name}", value)
    if vocabulary is not None and draft.sound("model.vocabulary") and draft["model.vocabulary"] < vocabulary:
        what = "the bytes of a text" if draft["data.tokenizer"] == BYTES else "the tokens of data.tokenizer"
        draft.refuse("model.vocabulary", f"at least {vocabulary}, {what}")
    if (
        not draft.given("data.factory")
        and draft.sound("model.context", "data.sequence_length")
        and draft["model.context"] < length
    ):
        draft.refuse("model.context", f"at least data.sequence_length = {length}")
    if draft.sound("model.width"):
        width = draft["model.width"]
        draft.default("model.hidden", 4 * width if kind == "gpt" else swiglu_hidden(width))
        if draft.sound("model.heads") and width % draft["model.heads"]:
            draft.refuse("model.heads", f"a divisor of model.width = {width}")
    if kind == "gpt":
        draft.default("model.dropout", 0.0)
    else:
        _llama_heads(draft)


def _llama_heads(draft: ConfigDraft) -> None:
    draft.default("model.tied", False)
    if not draft.sound("model.heads"):
        return
    heads = draft["model.heads"]
    draft.default("model.kv_heads", heads)
    if draft.sound("model.kv_heads") and heads % draft["model.kv_heads"]:
        draft.refuse("model.kv_heads", f"a divisor of model.heads = {heads}")
    if draft.sound("model.width") and draft["model.width"] // heads % 2:
        size = draft["model.width"] // heads
        draft.refuse("model.heads", "heads of an even size", f"model.width / model.heads is {size}")


def _experts(draft: ConfigDraft) -> None:
    """Fill in and check the keys of a model with experts."""
    if not draft.given("model.experts"):
        for key in (f"model.{name}" for name in EXPERTS):
            if draft.given(key) and draft.sound(key):
                draft.refuse(key, "left out, or model.experts beside it")
        return
    if not draft.sound("model.experts"):
        return
    experts = draft["model.experts"]
    defaults = {
        "experts_per_token": min(2, experts), "shared_experts": 0, "balance": "switch", "balance_weight": 0.01,
        "z_weight": 0.0, "bias_rate": 0.0,
    }  # fmt: skip
    for name, value in defaults.items():
        draft.default(f"model.{name}", value)
    if draft.sound("model.experts_per_token") and draft["model.experts_per_token"] > experts:
        draft.refuse("model.experts_per_token", f"1 to model.experts = {experts}")


def _optimizer(draft: ConfigDraft) -> None:
    if draft.sound("optimizer.name"):
        name = draft["optimizer.name"]
        if name in APPLIES["weight_decay"]:
            draft.default("optimizer.weight_decay", 0.1 if name in ("adamw", "muon") else 0.0)
        if name == "adafactor" and draft.given("optimizer.eps"):
            draft.refuse("optimizer.eps", 'left out, for "adafactor" has two, which OptimizerChoice takes')
        for option in ("weight_decay", "betas", "eps", "momentum", "nesterov", "amsgrad", "adjust_lr_fn"):
            if name not in APPLIES[option] and draft.given(f"optimizer.{option}"):
                draft.refuse(
                    f"optimizer.{option}", f'left out, for "{name}" has none; {", ".join(APPLIES[option])} have'
                )
        if name in APPLIES["betas"]:
            draft.default("optimizer.betas", (0.9, 0.99) if name == "lion" else (0.9, 0.95))
    schedule, steps = draft["optimizer.schedule"], draft["train.steps"]
    draft.default("optimizer.warmup_steps", 0 if schedule == "constant" else steps // 10)
    if draft.sound("optimizer.warmup_steps", "optimizer.schedule", "train.steps") and not draft["train.epochs"]:
        most = steps - decay_steps(schedule, steps)
        if draft["optimizer.warmup_steps"] > most:
            draft.refuse("optimizer.warmup_steps", f"at most {most}, with train.steps = {steps}")


def _loss_scale(draft: ConfigDraft) -> None:
    key = "train.loss_scale"
    if not draft.sound("parallel.precision"):
        return
    if draft["parallel.precision"] == "fp16":
        draft.default(key, "dynamic")
    elif draft.given(key) and draft.sound(key):
        draft.refuse(key, 'left out, for it belongs to parallel.precision = "fp16"')


def _tf32(draft: ConfigDraft) -> None:
    key, precision = "train.tf32", "parallel.precision"
    if draft.sound(key, precision) and draft[key] and draft[precision] != "fp32":
        draft.refuse(key, 'false, or parallel.precision = "fp32", which alone multiplies matrices of float32')


def _checkpoint(draft: ConfigDraft) -> None:
    if draft.sound("train.steps"):
        draft.default("checkpoint.every", max(1, draft["train.steps"] // 5))


def _mesh(draft: ConfigDraft) -> None:
    """Check that the number of ranks that share a layer is legal for their recipe."""
    if draft.sound("parallel.tp", "parallel.tensor"):
        try:
            sides(draft["parallel.tensor"], draft["parallel.tp"])
        except ConfigError as error:
            draft.refuse_field(error, f'With parallel.tensor = "{draft["parallel.tensor"]}"')


def _tensor(draft: ConfigDraft) -> None:
    """Check that the keys of tensor parallelism agree."""
    if not draft.sound(*(f"parallel.{key}" for key in ("tp", "tensor", "tensor_plan", "pins", "experts"))):
        return
    axes = tuple(ROLES[draft["parallel.tensor"]]) if draft["parallel.tp"] > 1 else ()
    try:
        pins = tuple((draft["parallel.pins"] or {}).items())
        words = draft["parallel.tensor"], draft["parallel.tensor_plan"]
        TensorOptions(*words, pins, experts=draft["parallel.experts"]).check_axes(axes)
    except ConfigError as error:
        draft.refuse_field(error)
    if not axes:
        draft.notices += [
            f'parallel.{key} = "{value}" changes nothing, for parallel.tp = 1: no ranks share a layer'
            for key, usual in {"tensor": "1d", "tensor_plan": "recipe", "experts": "inside"}.items()
            if (value := draft[f"parallel.{key}"]) != usual
        ]


def _devices(draft: ConfigDraft, hardware: Hardware) -> None:
    """Find the number of ranks: train.devices, or parallel.dp, pp and tp together, or what the hardware has."""
    keys = ("train.devices", "parallel.dp")
    if not draft.sound(*keys, *SAME_ROWS):
        return
    each = math.prod(draft[key] for key in SAME_ROWS)
    key = next(filter(draft.given, keys), None)
    if key is None:
        devices = hardware.world or _fitting_devices(draft, hardware, each) * each
    else:
        devices = draft[key] * (each if key == "parallel.dp" else 1)
    if not _there(draft, hardware, devices, key) or not _shared(draft, devices, f"train.devices = {devices}"):
        return
    if not hardware.world and not hardware.gpus and devices > hardware.cores:
        draft.notices.append(f"{devices} ranks share {hardware.cores} cores: correct, but slower than one rank a core")
    draft.default("train.devices", devices)
    draft.default("parallel.dp", devices // each)
    draft.default("train.threads", max(1, hardware.cores // (hardware.local or devices)))
    if draft["parallel.dp"] * each != devices:
        whole = f"train.devices = {devices}"
        legal = (
            f"{devices // each}, {whole}{_over(draft)}" if each > 1 else f"{whole}, for all devices are data parallel"
        )
        draft.refuse("parallel.dp", legal)
        return
    _shards(draft, devices // each)
    _pipeline(draft)


def _there(draft: ConfigDraft, hardware: Hardware, devices: int, key: str | None) -> bool:
    """Whether there are ``devices`` devices; if not, ``key``, which asks for them, is refused, or the key that makes
    any number too large.
    """
    each, over = (1, "") if key == "train.devices" else (math.prod(draft[key] for key in SAME_ROWS), _over(draft))
    if hardware.world and devices != hardware.world:
        what = "the number of ranks already started"
        if each == 1 or _shared(draft, hardware.world, f"{hardware.world}, {what}"):
            draft.refuse(str(key), f"{hardware.world // each}, {what}{over}")
        return False
    if not hardware.world and 0 < hardware.gpus < devices:
        if each <= hardware.gpus:
            draft.refuse(str(key), f"at most {hardware.gpus // each}, the GPUs of this machine{over}", MORE_RANKS)
        else:
            _shared(draft, hardware.gpus, "the GPUs of this machine", most=True)
        return False
    return True


def _shared(draft: ConfigDraft, devices: int, what: str, most: bool = False) -> bool:
    """Whether ``devices`` can be divided by the ranks with the same rows, evenly or, with ``most``, at all; else a key
    is refused.
    """
    left, over = devices, ""
    for key in SAME_ROWS:
        size = draft[key]
        if size > left if most else left % size:
            one_of = f"a divisor of {what}{over}: {divisors(left)}"
            draft.refuse(key, f"at most {left}, {what}{over}" if most else one_of)
            return False
        left, over = left // size, f" over {key} = {size}" if size > 1 else over
    return True


def _over(draft: ConfigDraft) -> str:
    """Return the ranks with the same rows as `` over parallel.pp x parallel.tp = 2 x 4``, or "" if there is one."""
    sizes = {key: draft[key] for key in SAME_ROWS if draft[key] > 1}
    return f" over {' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}" if sizes else ""


def _pipeline(draft: ConfigDraft) -> None:
    """Check that the schedule is legal for its ranks, stages and microbatches."""
    keys = ("pp", "schedule", "stages_per_rank", "stages", "timetable", "microbatches")
    if not draft.sound(*(f"parallel.{key}" for key in keys)):
        return
    pp, name, microbatches = (draft[f"parallel.{key}"] for key in ("pp", "schedule", "microbatches"))
    if name == AUTO:
        _auto(draft, pp, microbatches)
        return
    if draft["parallel.timetable"] is not None:
        draft.refuse("parallel.timetable", f'left out, for "{name}" has its own, or schedule "{AUTO}"')
        return
    draft.default("parallel.stages_per_rank", SCHEDULES[name].stages_per_rank)
    try:
        check_schedule(name, pp, microbatches, draft["parallel.stages_per_rank"])
        if draft.sound(
            "parallel.zero", "parallel.precision", "parallel.reduce", "parallel.vertical_sync", "parallel.norm"
        ):
            options = PipelineOptions(name, vertical_sync=draft["parallel.vertical_sync"], norm=draft["parallel.norm"])
            options.check_ranks(pp, microbatches)
            if pp > 1:
                sharded = draft["parallel.zero"] > 0 and draft["parallel.dp"] > 1
                check_asynchronous(name, draft["parallel.precision"], draft["parallel.reduce"], sharded=sharded)
    except ConfigError as error:
        draft.refuse_field(error, f'With schedule "{name}" over {pp} ranks')
        return
    stages = draft["parallel.stages"]
    wanted = pp * draft["parallel.stages_per_rank"]
    if stages is not None and len(stages) != wanted:
        draft.refuse("parallel.stages", _one_each(wanted))
    alone = SCHEDULES[name].stages_alone and pp > 1
    draft.default("train.clip_norm", 0.0 if alone else 1.0)
    if alone and draft["train.clip_norm"]:
        draft.refuse("train.clip_norm", f'0: with schedule "{name}" no stage waits for the norm of all')


def _one_each(stages: int | str) -> str:
    return f"{stages} number{'s' * (stages != 1)}, one for each stage"


def _auto(draft: ConfigDraft, pp: int, microbatches: int) -> None:
    """Check schedule "auto": that the given timetable can be computed or, without one, that one can be looked for."""
    texts, stages, each = (draft[f"parallel.{key}"] for key in ("timetable", "stages", "stages_per_rank"))
    if texts is not None:
        try:
            each = len(rank_of_stage(read(texts, pp, each, microbatches))) // pp
        except ConfigError as error:
            draft.refuse_field(error)
            return
    elif pp == 1:
        draft.refuse("parallel.schedule", "another, or parallel.pp of at least 2", "A rank by itself waits for nobody")
    elif microbatches == 1:
        draft.refuse(
            "parallel.microbatches",
            "at least 2",
            f'With schedule "{AUTO}", which measures backward whole and in two parts',
        )
    if stages is not None:
        if len(stages) % pp or (each is not None and len(stages) != each * pp):
            draft.refuse("parallel.stages", _one_each(pp * each if each else f"a multiple of {pp}"))
        each = len(stages) // pp
    draft.default("parallel.stages_per_rank", each)


def _shards(draft: ConfigDraft, ranks: int) -> None:
    """Check that the keys of ZeRO make sense with ``ranks`` data-parallel ranks."""
    if draft.sound("parallel.reduce", "parallel.precision"):
        precise = draft["parallel.precision"] == "fp64"
        if draft["parallel.reduce"] != "auto" and (draft["parallel.reduce"] == "fp64") != precise:
            draft.refuse("parallel.reduce", 'auto or "fp64"' if precise else 'auto, "fp32", "bf16" or "fp16"')
    groups, key = draft["parallel.dp_replicate"], "parallel.dp_replicate"
    if not draft.sound(key, "parallel.zero"):
        return
    if ranks % groups:
        draft.refuse(key, f"a divisor of parallel.dp = {ranks}: {divisors(ranks)}")
    elif draft["parallel.zero"] and ranks // groups == 1:
        smallest = f"parallel.dp of at least {2 * groups}" + (f" with {key} = {groups}" if groups > 1 else "")
        draft.refuse("parallel.zero", f"0, or {smallest}", "There is one rank to shard over")
    elif groups > 1 and not any(draft[f"parallel.{one}"] for one in ("zero", "local_steps")) and not serves(draft):
        legal = "1, or parallel.zero or parallel.local_steps of at least 1"
        draft.refuse(key, legal, "Nothing is sharded within a group")
    check_islands(draft, groups)
    check_servers(draft, ranks // groups if groups and not ranks % groups else ranks)


def _fitting_devices(draft: ConfigDraft, hardware: Hardware, each: int) -> int:
    """Return the largest number of groups of ``each`` devices that divides the rows of a microbatch."""
    keys = ("data.batch_size", "parallel.microbatches")
    batch, microbatches = (draft[key] for key in keys)
    most: int = max(1, hardware.devices // each)
    if not draft.sound(*keys) or batch % microbatches:
        return most
    count = next(n for n in range(most, 0, -1) if batch // microbatches % n == 0)
    if count < most:
        draft.notices.append(
            f"using {count * each} of {hardware.devices} devices, for data.batch_size / parallel.microbatches = "
            f"{batch} / {microbatches} is divisible by no more"
        )
    return count


def _batch(draft: ConfigDraft) -> None:
    keys = ("data.batch_size", "parallel.dp", "parallel.microbatches")
    if not draft.sound(*keys, "train.devices", "parallel.server", *SAME_ROWS):
        return
    batch, dp, microbatches = (draft[key] for key in keys)
    dp = 1 if draft["parallel.server"] in APART else dp  # each worker has batches of its own
    unit = dp * microbatches
    if batch % unit:
        near = " or ".join(str(rows) for rows in (batch // unit * unit, batch // unit * unit + unit) if rows)
        legal = f"a multiple of parallel.dp x parallel.microbatches = {dp} x {microbatches}, such as {near}"
        draft.refuse("data.batch_size", legal)
