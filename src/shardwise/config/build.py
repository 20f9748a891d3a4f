"""Build what a configuration describes: the model, the loss, the data, the plan, and the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.metrics import is_ready
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.core.schedules import AUTO
from shardwise.core.server_options import APART
from shardwise.data.corpus import Corpus, open_corpus
from shardwise.data.forming import kind_of
from shardwise.data.mixture import Joined, Mixture
from shardwise.data.padding import Padded, Padding
from shardwise.data.samples import Samples
from shardwise.data.sft import Conversations, open_conversations
from shardwise.data.split import split
from shardwise.data.streams import LEGAL, Source, is_dataset, is_loader, source_of
from shardwise.data.tokenise import OnProgress
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.data.windows import DocumentFields
from shardwise.models import GPT, Llama
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.overlap import overlapped
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import asynchronous_server, parameter_server
from shardwise.parallel.tables import table_gradients
from shardwise.parallel.tensor import tensor_parallel
from shardwise.parallel.whole_tensors import whole_tensors_for
from shardwise.train.given_metrics import metrics_of
from shardwise.train.metrics import Metric
from shardwise.train.torch_metrics import is_torch_metric

from .config import Config
from .defaults import EXPERTS, KEYS_OF_KIND
from .factories import call, load_function
from .lora import with_adapters
from .optimizer import optimizer_choice
from .pretrained import PretrainedFolder
from .sections import ModelConfig
from .toml import shown
from .transformer import TextShape, pretrained_constructor, transformers_constructor

Constructor = Callable[[], nn.Module]
LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]
Decode = Callable[[Iterable[int]], str]


def build_model(config: Config) -> tuple[Constructor, LossFunction | None]:
    """Return a function that makes the model, and the user's ``loss(output, batch)`` or None.

    All that can be checked without making the model is checked here. :class:`ConfigError`, here or from the
    constructor, names the key, and the file and line if a function of the user failed.
    """
    model = config.model
    loss = None if model.loss is None else load_function("model.loss", model.loss)
    if model.of_transformers:
        return with_adapters(model, _base_constructor(config)), loss
    if model.factory is not None:
        load_function("model.factory", model.factory)
        documents = config.data.attention == "document"
        return _factory_constructor(model, aligned=config.data.is_text and loss is None, documents=documents), loss
    sizes = {name: getattr(model, name) for name in KEYS_OF_KIND[str(model.name)] if name not in EXPERTS}
    if model.experts is not None:
        sizes["moe"] = {argument: getattr(model, name) for name, argument in EXPERTS.items()}
        sizes["moe"]["balance"] = None if model.balance == "none" else model.balance
    return lambda: GPT(**sizes) if model.name == "gpt" else Llama(**sizes), loss


def build_base_model(config: Config) -> Constructor:
    """Return a function that makes the model without the adapters of ``model.lora``."""
    return _base_constructor(config) if config.model.of_transformers else build_model(config)[0]


def _base_constructor(config: Config) -> Constructor:
    model, values = config.model, config.model.config or {}
    if model.pretrained is not None:
        return pretrained_constructor(PretrainedFolder.open(model.pretrained), values, _text_shape(config))
    return transformers_constructor(str(model.transformers), values, _text_shape(config))


@dataclass(frozen=True)
class Data:
    """The data of a run.

    ``train`` and ``validation`` (None if there is none) are map-style datasets of dicts of tensors. ``decode`` turns
    tokens into text and ``encode`` text into tokens; both are None if the data is not text. ``digest`` identifies the
    training data, ``notices`` are remarks for the user, and ``prompt`` has the tokens that begin a sample
    where the user gives no text for it.
    """

    train: Any
    validation: Any | None
    decode: Decode | None
    encode: Callable[[str], list[int]] | None
    digest: str
    notices: tuple[str, ...] = ()
    prompt: tuple[int, ...] = ()


def build_data(config: Config, progress: OnProgress | None = None) -> Data:
    """Return the data of ``config``, as :func:`_data` does.

    :class:`ConfigError` too if evaluations are needed and there is nothing to evaluate on.
    """
    data, share = _data(config, progress), config.validation.share
    needs: list[tuple[str, Any]] = [
        ("checkpoint.best", config.checkpoint.best),
        ("validation.patience", config.validation.patience),
    ]
    needs.append(("validation.metrics", list(config.validation.metrics or ()) or None))
    key, value = next(((key, value) for key, value in needs if value is not None), ("", None))
    if key and data.validation is None and share:
        wrong = f"there is nothing to evaluate on, for validation.share = {share:g} sets nothing of the data apart"
        raise ConfigError.on(f"{key} = {shown(value)}", wrong, "a greater validation.share, or more data")
    return data


def _data(config: Config, progress: OnProgress | None) -> Data:
    """Return the data of ``config``; text is tokenised if that has not been done, with calls ``progress(done, total)``.

    The labels of text are the next tokens; for ``model.transformers`` they are the tokens themselves, for these models
    shift them. Raises :class:`ConfigError` if the data cannot be read, is empty, or is no dataset of dicts of tensors,
    for which sample 0 is tried.
    """
    data = config.data
    own = _own_dataset(config)
    if data.factory is not None:
        train = _factory_dataset("data.factory", data.factory, data.arguments or {})
        held_out: Any = own
        if data.pad is not None:
            return _padded(config, train, held_out)
        if (source := source_of(train, data.batch_size)) is not None:
            _check_stream(config, source)
            return Data(train, held_out, None, None, "")
        if config.validation.share:
            Samples(train)  # checks it
            train, held_out = split(train, config.validation.share)
        _check_fields(train, held_out)
        return Data(train, held_out, None, None, Samples(train).digest)
    fields: DocumentFields = "none"
    if data.attention == "document":
        fields = "mask" if config.model.of_transformers else "documents"
    shape: dict[str, Any] = {"shifted": not config.model.of_transformers, "fields": fields}
    build = _text if data.sft is None else _examples
    return build(config, shape, own, progress)


def _text(config: Config, shape: Mapping[str, Any], own: Any, progress: OnProgress | None) -> Data:
    data = config.data
    mix = data.mix or ({"source": data.source, "weight": 1.0},)
    corpora = [_corpus(config, part["source"], progress, config.validation.share) for part in mix]
    parts = [corpus.train(data.sequence_length, **shape) for corpus in corpora]
    train = parts[0] if data.mix is None else Mixture(parts, [part["weight"] for part in mix])
    apart = [corpus.validation(data.sequence_length, **shape) for corpus in corpora]
    held = [part for part in apart if part is not None]
    validation = own if not held else held[0] if len(held) == 1 else Joined(held)
    if config.validation.source is not None:
        apart_corpus = _corpus(config, config.validation.source, progress, 0.0)
        corpora.append(apart_corpus)
        validation = apart_corpus.train(data.sequence_length, **shape)
    _check_fields(train, validation)
    notices = [notice for corpus in corpora for notice in corpus.cache.notices]
    if config.validation.share:
        short = [corpus for corpus, part in zip(corpora, apart, strict=True) if part is None]
        notices += [_too_little(short)] if short else []
    tokenizer = corpora[0].tokenizer
    encode = partial(_encoded, tokenizer)
    return Data(train, validation, tokenizer.decode, encode, Samples(train).digest, tuple(notices))


def _examples(config: Config, shape: Mapping[str, Any], own: Any, progress: OnProgress | None) -> Data:
    """Return the prompts with answers of ``data.sft``."""
    data, share = config.data, config.validation.share
    found = _conversations(config, data.sft or (), progress, share)
    train = found.train(data.sequence_length, **shape)
    validation = found.validation(data.sequence_length, **shape) if own is None else own
    notices = []
    if train.cut or train.left_out:
        without = f", and {train.left_out} more left out, whose answer comes later" if train.left_out else ""
        notices.append(f"{train.cut} examples cut to data.sequence_length = {data.sequence_length}{without}")
    if share and validation is None:
        notices.append(f"no validation on {found.name}: no example is set apart (validation.share = {share:g})")
    if config.validation.source is not None:
        apart = _conversations(config, config.validation.source, progress, 0.0)
        validation = apart.train(data.sequence_length, **shape)
    _check_fields(train, validation)
    encode = partial(_encoded, found.tokenizer)
    return Data(
        train, validation, found.tokenizer.decode, encode, Samples(train).digest, tuple(notices), tuple(found.prompt)
    )


def _conversations(
    config: Config, source: str | tuple[str, ...], progress: OnProgress | None, share: float
) -> Conversations:
    data = config.data
    return open_conversations(
        source, tokenizer=str(data.tokenizer), end_token=data.end_token, validation=share, cache_dir=data.cache_dir,
        progress=progress,
    )  # fmt: skip


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode([text.encode(errors="replace")])[0]]


def _own_dataset(config: Config) -> Any:
    """Return the dataset of ``validation.factory``, or None."""
    own = config.validation
    return None if own.factory is None else _factory_dataset("validation.factory", own.factory, own.arguments or {})


def _padded(config: Config, train: Any, held_out: Any) -> Data:
    """Return data whose rows are filled up to the longest of a batch."""
    data = config.data
    padding = Padding(data.pad or {}, data.pad_to_multiple_of or 1, data.pad_mask)
    if is_loader(train):
        raise ConfigError.on(f"data.pad of {kind_of(train)}", "it makes batches itself", "a dataset")
    if config.validation.share and is_dataset(train):
        train, held_out = split(train, config.validation.share)
    elif config.validation.share:
        wrong = f"of {kind_of(train)}"
        raise ConfigError.on(f"validation.share = {config.validation.share:g}", wrong, "validation.factory")
    if config.parallel.server in APART:
        legal = "data without data.pad, for the workers of servers take batches in any order"
        raise ConfigError.on("data.pad", f"with parallel.server = {shown(config.parallel.server)}", legal)
    held_out = None if held_out is None else Padded(held_out, padding)
    return Data(Padded(train, padding), held_out, None, None, "")


def _check_stream(config: Config, source: Source) -> None:
    """Raise :class:`ConfigError` for what only a map-style dataset allows, and for another batch size than its own."""
    kind, rows = kind_of(source.theirs), config.data.batch_size
    if source.batch_size not in (None, rows):
        legal = f"{source.batch_size}, the rows of a step over all ranks"
        raise ConfigError.on(f"data.batch_size = {rows}", f"{kind} gives {source.batch_size}", legal)
    if config.validation.share:
        raise ConfigError.on(f"validation.share = {config.validation.share:g}", f"of {kind}", "validation.factory")
    if config.parallel.server in APART:
        legal = "a map-style dataset, for the workers of servers take batches in any order"
        raise ConfigError.on(f"data.factory = {shown(config.data.factory)}", f"it returned {kind}", legal)


def _check_fields(train: Any, validation: Any) -> None:
    """Raise :class:`ConfigError` where samples to evaluate on have other fields than those to train on."""
    if validation is None or source_of(validation, 1) is not None:
        return
    here, there = Samples(validation).reference, Samples(train).reference
    if set(here) != set(there):
        wrong = f"its samples have the fields {', '.join(sorted(here))}"
        raise ConfigError.on("validation", wrong, f"those of the training data: {', '.join(sorted(there))}")
    for name, value in here.items():
        if value.dtype != there[name].dtype:
            wrong = f'its field "{name}" is {value.dtype}'
            raise ConfigError.on("validation", wrong, f"that of the training data, {there[name].dtype}")


def _corpus(config: Config, source: str | tuple[str, ...], progress: OnProgress | None, share: float) -> Corpus:
    data = config.data
    return open_corpus(
        source, tokenizer=str(data.tokenizer), end_token=data.end_token, field=str(data.text_field),
        validation=share,
        cache_dir=data.cache_dir, progress=progress, alone=data.mix is None or len(data.mix) == 1,
    )  # fmt: skip


def _too_little(corpora: Sequence[Corpus]) -> str:
    """Return a line for all sources whose documents set apart do not fill a sample."""
    first, more = corpora[0].name.split(", ")[0], len(corpora) - 1
    apart, documents = (
        sum(one.cache.validation.documents for one in corpora),
        sum(one.cache.documents for one in corpora),
    )
    where = f"{first} and {more} more" if more else first
    short = ", less than one sample" if apart else ""
    return (
        f"no validation on {where}: {apart} of {documents} documents apart{short} (validation.share = "
        f"{corpora[0].fraction:g})"
    )


def _text_shape(config: Config) -> TextShape | None:
    data = config.data
    if not data.is_text:
        return None
    tokenizer = open_tokenizer(str(data.tokenizer), data.end_token)
    return TextShape(data.sequence_length, tokenizer.vocabulary, data.attention == "document")


def _factory_dataset(key: str, reference: str, arguments: Mapping[str, Any]) -> Any:
    dataset = call(key, reference, arguments)
    if hasattr(dataset, "__next__") or not (is_dataset(dataset) or hasattr(dataset, "__iter__")):
        raise ConfigError.on(f"{key} = {shown(reference)}", f"it returned {_kind(dataset)}", LEGAL)
    source_of(dataset, 1)  # raises for what cannot be read
    return dataset


def build_metrics(config: Config, module: nn.Module | None = None) -> list[Metric]:
    """Return the metrics of ``validation.metrics`` for outputs of ``module``; :class:`ConfigError` names one that is no
    function or cannot be loaded."""
    named: dict[str, Any] = {}
    for one in config.validation.metrics or ():
        if is_ready(one):
            named[one] = one
            continue
        key, name = "validation.metrics", one.rpartition(":")[2]
        found = load_function(key, one)
        if not is_torch_metric(found) and not _parameters(found):
            found = call(key, one, {})
            if not is_torch_metric(found):
                legal = "an object of torchmetrics, or a function of (outputs, batch)"
                raise ConfigError(f"{key} = {shown(one)}: it returned {_kind(found)}; legal: {legal}")
        named[name] = found
    return metrics_of(named, module)


def _parameters(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter that a call has to give."""
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.default is one.empty and one.kind not in (one.VAR_KEYWORD,) for one in every)


def build_plan(config: Config) -> Plan:
    """Return the plan of a config; values of ``gathered``, ``reduced`` and ``prefetch`` that the config leaves open
    take the least memory.

    If the config leaves the timetable of schedule "auto" open, the plan has a schedule that takes little memory, for
    the launcher to measure with.
    """
    optimizer = build_optimizer(config)
    plan = table_gradients(_plan(config), optimizer, config.parallel.sparse_gradients)
    return whole_tensors_for(plan, optimizer)


def _plan(config: Config) -> Plan:
    parallel = config.parallel
    plan = Plan.of(
        microbatches=config.microbatches_of_step,
        recompute=parallel.recompute,
        precision=parallel.precision,
        dropout=config.train.dropout,
        offload=parallel.offload,
        gathered=parallel.gathered or "use",
        prefetch=1 if parallel.prefetch is None else parallel.prefetch,
        reduced=parallel.reduced or "microbatch",
        reduce=parallel.reduce,
        rows=parallel.rows,
        norm=parallel.norm,
        window=parallel.window,
    )
    plan = tensor_parallel(
        plan, parallel.tp, parallel.tensor, parallel.tensor_plan, parallel.pins or {}, parallel.experts
    )
    plan = context_parallel(plan, parallel.cp, parallel.context)
    plan = expert_parallel(plan, parallel.ep)
    if parallel.server in APART:
        return asynchronous_server(
            plan, parallel.server, parallel.server_ranks, parallel.dp, staleness=parallel.staleness,
            pull_every=parallel.pull_every, rate=parallel.server_rate, push=parallel.push,
            push_share=parallel.push_share,
        )  # fmt: skip
    islands = parallel.dp_replicate if parallel.local_steps else 1
    plan = data_parallel(plan, parallel.dp // islands, parallel.zero, parallel.dp_replicate // islands)
    if parallel.server == "sync":
        plan = parameter_server(plan, parallel.server_ranks)
    schedule = parallel.schedule
    if schedule == AUTO and parallel.timetable is None:
        schedule = "1f1b" if parallel.stages_per_rank in (None, 1) else "interleaved"
    plan = pipeline(
        plan, parallel.pp, schedule, parallel.stages_per_rank, parallel.stages or (), parallel.timetable or ()
    )
    plan = overlapped(plan.replace(vertical_sync=parallel.vertical_sync), parallel.overlap)
    return local_training(
        plan, islands, parallel.local_steps, fragments=parallel.local_fragments, mix=parallel.local_mix,
        outer_lr=parallel.outer_lr, outer_momentum=parallel.outer_momentum,
    )  # fmt: skip


def build_optimizer(config: Config, model: nn.Module | None = None) -> OptimizerChoice:
    """Return the optimizer and its learning rate over the steps of the run; with ``model`` its groups are those of this
    model's parameters."""
    given = {field.name: getattr(config.optimizer, field.name) for field in fields(config.optimizer)}
    chosen = optimizer_choice(given, config.train.steps)
    return chosen if model is None else chosen.resolved(name for name, _ in model.named_parameters())


def build_loss_scale(config: Config) -> ScaleChoice | None:
    """Return how the loss is scaled in fp16; None in other precisions."""
    chosen = config.train.loss_scale
    if chosen is None:
        return None
    return ScaleChoice() if chosen == "dynamic" else ScaleChoice.fixed(chosen)


def _factory_constructor(model: ModelConfig, aligned: bool, documents: bool) -> Constructor:
    reference, arguments = str(model.factory), model.arguments or {}

    def construct() -> nn.Module:
        made = call("model.factory", reference, arguments)
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model.factory = {shown(reference)}: it returned {_kind(made)}; legal: an nn.Module")
        if aligned and any(base.__name__ == "PreTrainedModel" for base in type(made).__mro__):
            # It would silently learn to predict the token after the next one.
            why = "which shifts labels itself, but those of data.source are shifted already"
            wrong = f"{type(made).__name__} is a transformers model, {why}"
            legal = "model.transformers with [model.config], a data.factory, or a model.loss of yours"
            raise ConfigError.on(f"model.factory = {shown(reference)}", wrong, legal)
        if documents and "documents" not in inspect.signature(made.forward).parameters:
            raise ConfigError(
                f'data.attention = "document": the forward of {type(made).__name__}, from model.factory = '
                f"{shown(reference)}, has no "
                'parameter documents; legal: data.attention = "full", or a forward that takes documents (B, S), which '
                "says which "
                "document each token is of"
            )
        return made

    return construct


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
