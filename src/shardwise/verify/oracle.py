"""Train the user's module on a single device in the ordinary way: this is the truth that a plan is compared with.

It runs forward and ``backward()`` of the whole module, microbatch by microbatch, then clipping and a plain
``torch.optim`` step.  Nothing here knows of graphs, plans or ranks; it shares with them only how a module and its loss
are called, in which dtypes fields and buffers come, the hash behind random numbers, the way to intercept torch
functions, and the rule that cuts a batch into microbatches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise.backend import Backend
from shardwise.capture.casts import COMPUTE_DTYPE, cast_buffer, cast_field
from shardwise.capture.draws import Draw, batch_dims, decides
from shardwise.capture.hooks import UserHooks
from shardwise.capture.host_draws import seeded
from shardwise.capture.intercept import Intercept
from shardwise.capture.keyed_calls import KeyedRandom, RefuseRandom
from shardwise.capture.state import generators, kept_tensors
from shardwise.capture.wrapped import LossFunction, WithLoss
from shardwise.core.averaging import Averaging
from shardwise.core.errors import ShardwiseError
from shardwise.core.fields import has_rows
from shardwise.core.layout import shard_range
from shardwise.core.numeric_options import LOW_PRECISIONS, Precision
from shardwise.core.optim import OptimizerChoice
from shardwise.graph.dtypes import default_dtype
from shardwise.ops.keyed_random import Rows
from shardwise.runtime.lamb import Lamb
from shardwise.runtime.lion import Lion
from shardwise.runtime.shampoo import Shampoo
from shardwise.verify.device import Together
from shardwise.verify.looked_up import LookedUp
from shardwise.verify.losses import MeanCrossEntropy
from shardwise.verify.parts import BatchNormInParts
from shardwise.verify.precision import LowPrecision, WideGroupedMatmul, batch_norm_parameters
from shardwise.verify.promote import Promote64
from shardwise.verify.rounding import turned

Fields = Mapping[str, Tensor]
Settings = Sequence[Mapping[str, Any]]
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""This makes an optimizer from parameter groups, as :mod:`torch.optim` takes them."""


@dataclass(frozen=True)
class OracleStep:
    """This is what one step computed.

    ``gradients`` are those of the whole batch, before clipping, of the parameters that have one; ``parameters``,
    ``buffers`` and ``averages``, the moving averages of the parameters if there are any, are those after the step.  A
    tied parameter appears once, under its first name.  All tensors are on the host.
    """

    step: int
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)


class Oracle:
    """Train a copy of ``module`` on one device.

    :class:`~shardwise.capture.wrapped.WithLoss` says how ``module`` and ``loss_fn`` are called, and what they may
    return.  The module's mode (training or not) is kept.

    By default a step computes the loss of the whole batch in one piece, with statistics of BatchNorm over ``parts``
    parts of it.  With ``microbatches`` the loss is sum_m w_m L_m over these, of which m holds rows ``shard_range(B,
    microbatches, m)``.  Where the loss is the result of a mean cross-entropy, w_m is m's share of the batch's targets
    that are not ignored, each by the weight of its class, else its share of rows.

    ``precision`` is ``fp64`` (parameters, buffers and inputs become doubles, and so does every cast inside the model:
    ``promotions`` counts them), ``fp32`` (parameters are fp32, buffers and inputs at least that), or ``bf16`` or
    ``fp16`` (parameters, but not BatchNorm's, are low-precision copies of fp32 masters; buffers are at least fp32,
    inputs stay as they are; mixed operands of matmuls are cast to the low dtype; losses, and under ``fp16`` results
    that easily leave its range, are computed in fp32; gradients are summed in fp32).

    Losses are multiplied by ``loss_scale`` before backward and gradients divided by it after: under ``fp16`` small
    gradients would otherwise be zero.

    ``version(name, microbatch)`` is the number of updates after which forward and backward use a parameter's value,
    with microbatches counted over all steps; by default they use the newest.

    Random functions inside forward are keyed by (``seed``, step, ordinal, row of the global batch):
    :mod:`shardwise.capture.keyed_calls` says which calls count.  Others are refused by name.  ``drawing(step)`` stands
    for the step where several runs must draw different numbers.

    ``optimizer`` makes the optimizer from parameter groups: one for each number that ``group_of(name, shape)`` gives,
    those of odd numbers (by default norms and biases: fewer than two dims) with ``weight_decay = 0``.  Without it,
    parameters stay as they are.  With ``averaging`` they have an average, which torch's ``AveragedModel`` computes.

    With ``turns`` of 1 or 2 each piece of a batch has its rows in another order, each with its own random numbers: the
    step is the same but for rounding (:mod:`shardwise.verify.rounding`).

    ``device`` is where all is computed, by default where the module's first parameter is.  Tensors that forward or
    ``loss_fn`` make, and those of the host that they hold, go there too.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        microbatches: int = 1,
        parts: int = 1,
        precision: Precision = "fp64",
        seed: int = 0,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        group_of: Callable[[str, tuple[int, ...]], int] = lambda name, shape: len(shape) < 2,
        loss_scale: float = 1.0,
        version: Callable[[str, int], int] | None = None,
        device: torch.device | None = None,
        drawing: Callable[[int], int] = lambda step: step,
        averaging: Averaging | None = None,
        turns: int = 0,
    ) -> None:
        self.device = device or next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        self.loss_fn = loss_fn
        self.microbatches = microbatches
        self.precision = precision
        self.clip_norm, self.clip_value, self.loss_scale = clip_norm, clip_value, loss_scale
        self.step_index = 0
        self.promotions = 0
        self.module = _copy(module, precision, self.device)
        self.masters = self._masters(module)
        self._hooks = UserHooks.of(module).copied().parameters  # what the user's hooks keep is not touched
        # Hooks see the gradient of the whole batch: in one backward of the very parameters, or at the end of several.
        self._hooks_last = microbatches > 1 or loss_scale != 1 or precision in LOW_PRECISIONS
        if not self._hooks_last:
            self._register_hooks()
        self.optimizer = optimizer(_groups(self.masters, group_of)) if optimizer is not None else None
        self.averaging = averaging if averaging is not None and averaging.ema is not None else None
        self.average = None if self.averaging is None else averaged_model(self.averaging, self.masters)
        self.version = version
        self._history = [] if version is None else [self.parameters()]  # after each update
        self._random, self._drawing = KeyedRandom(seed), drawing
        self._losses = MeanCrossEntropy()
        self._norms, self.parts = BatchNormInParts(), parts
        self.turns, self._order = turns, list[int]()
        self._probed = self._decides = False
        self._draws_by_place = False  # whether forward draws from Python's generators, which know no rows
        self._looked_up = LookedUp()

    def step(self, batch: Fields, given: float | Settings | None = None) -> OracleStep:
        """Train on ``batch``, tensors with the global batch's rows in dim 0; ``given`` is the learning rate, or the
        hyperparameters of each group by its number, if they change."""
        fields = self._fields(batch)
        if not self._probed or self._decides:
            self._probe(fields)
        self._order = []
        if self.turns and not self._draws_by_place:
            fields, self._order = turned(fields, self.microbatches * self.parts, self.turns)
        loss = self._accumulate(fields)
        if self._hooks_last:
            self._call_hooks()
        gradients = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        kept = {name: grad.detach().clone() for name, grad in gradients.items()}
        norm = float(torch.nn.utils.get_total_norm(list(gradients.values()))) if gradients else 0.0
        if self.optimizer is not None:
            if self.version is not None:
                self._show(self._history[-1])
            self._update(given)
        if self.version is not None:
            self._history.append(self.parameters())
        self._take_average()
        self.step_index += 1
        found = (on_host(values) for values in (kept, self.parameters(), self.buffers(), self.averages()))
        return OracleStep(self.step_index - 1, loss, norm, *found)

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters (of the fp32 masters in low precision), by name."""
        return {name: p.detach().clone() for name, p in self.masters.items()}

    def averages(self) -> dict[str, Tensor]:
        """Return copies of the averages of the parameters, by name; none without ``averaging``."""
        if self.average is None:
            return {}
        return {name: p.detach().clone() for name, p in zip(self.masters, self.average.parameters(), strict=True)}

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers, by name."""
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}

    # ---- forward and backward --------------------------------------------------------------------

    def _accumulate(self, fields: Fields) -> float:
        """Leave the batch's gradients in the masters' ``grad``; return its loss.

        The total that shares refer to is known only at the end, so gradients are summed with weights relative to the
        first microbatch's and divided once.
        """
        for p in (*self.masters.values(), *self.module.parameters()):
            p.grad = None
        self._looked_up.begin()
        rows = _rows(fields)
        counted: set[bool] = set()
        first = total = 0.0
        loss = 0.0
        for m in range(self.microbatches):
            start, stop = shard_range(rows, self.microbatches, m)
            if start == stop:
                continue
            if self.version is not None:
                at = (len(self._history) - 1) * self.microbatches + m
                self._show({name: self._history[self.version(name, at)][name] for name in self.masters})
            with self._modes():
                some = {k: v[start:stop] if has_rows(k) else v for k, v in fields.items()}
                numbers = self._order[start:stop] or start
                value, targets = self._forward(self.module, some, numbers, self.parts)
                counted.add(targets is not None)
                amount = stop - start if targets is None else targets
                first = first or amount or 1.0
                factor = (amount or 1.0) / first  # where targets weigh nothing the loss is a sum
                share = value if factor == 1 else value * factor
                share = cast_buffer(share, self.precision) * self.loss_scale
                share.backward()  # type: ignore[no-untyped-call]
            loss += value.item() * factor
            total += amount / first
            self._collect()
        if len(counted) > 1:
            raise ShardwiseError(
                "the loss is a mean cross-entropy in some microbatches and not in others: their weights are unknown"
            )
        if not total:
            raise ShardwiseError("every target of the batch is ignored: its mean cross-entropy is 0/0")
        self._looked_up.give(self.masters)
        if (divisor := total * self.loss_scale) != 1:
            for p in self.masters.values():
                if p.grad is not None:
                    p.grad.div_(divisor)
        return loss / total

    def _forward(
        self, module: nn.Module, fields: Fields, row_start: Rows, parts: int = 1
    ) -> tuple[Tensor, float | None]:
        """Return the loss, and the number of its targets (or the sum of their weights) if it is a mean cross-entropy;
        call it under the modes. BatchNorm sees the rows in ``parts`` parts."""
        self._random.begin(self._drawing(self.step_index), row_start, _rows(fields))
        self._losses.begin()
        self._norms.begin(_rows(fields), parts)
        first = row_start if isinstance(row_start, int) else 0
        with seeded(self._random.seed, self._drawing(self.step_index), first):
            before = generators()
            loss = self._losses.of(WithLoss(module, self.loss_fn)(fields))
            self._draws_by_place |= generators() != before
        self._norms.end()
        self._random.end()
        return loss

    @contextmanager
    def _modes(self) -> Iterator[None]:
        layers: list[Any] = [self._losses, self._norms, self._random]
        if self.precision in LOW_PRECISIONS:
            layers.append(LowPrecision(COMPUTE_DTYPE[self.precision]))
        if self.precision == "fp64":
            layers.append(WideGroupedMatmul())
        with ExitStack() as stack:
            if Backend.of(self.device).asynchronous:
                layers.append(Together(self.device))
                stack.enter_context(self.device)  # factories make their tensors there
                stack.enter_context(
                    torch.autograd.set_multithreading_enabled(False)
                )  # backward in this thread, under these modes
            promote = Promote64() if self.precision == "fp64" else None
            if promote is not None:
                stack.enter_context(default_dtype(torch.float64))
                stack.enter_context(promote)
            stack.enter_context(RefuseRandom())
            stack.enter_context(Intercept(*layers))
            yield
        if promote is not None:
            self.promotions += promote.promotions

    @torch.enable_grad()
    def _probe(self, fields: Fields) -> None:
        """Find the batch dims of random calls: run a copy of the module with two rows and with more, or, where it takes
        no so few, with those of the batch and with more.  A forward that may decide by random numbers does other calls
        in other steps."""
        promotions, self._random.keys = self.promotions, None
        draws, whole = partial(self._draws, fields), self.microbatches == 1
        self._random.keys = batch_dims(draws, (2, _rows(fields)), whole, several=True)
        self.promotions = promotions
        self._probed = True

    def _draws(self, fields: Fields, rows: int) -> list[Draw]:
        """Return the random calls of a forward of ``rows`` rows."""
        index = torch.arange(rows) % _rows(fields)
        some = {k: v[index.to(v.device)] if has_rows(k) else v for k, v in fields.items()}
        module = copy.deepcopy(self.module, kept_tensors(self.module))
        with self._modes():
            self._forward(module, some, 0)
        self._decides |= decides(self._random.draws)
        return self._random.draws

    def _register_hooks(self) -> None:
        for name, hooks in self._hooks.items():
            p = self.module.get_parameter(name)
            for hook in hooks.gradient:
                p.register_hook(hook)  # type: ignore[no-untyped-call]
            for hook in hooks.after:
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _call_hooks(self) -> None:
        for name, hooks in self._hooks.items():
            p = self.masters[name]
            if p.grad is None:
                continue
            p.grad = hooks.changed(p.grad)
            for hook in hooks.after:
                hook(p)

    # ---- parameters ------------------------------------------------------------------------------

    def _masters(self, module: nn.Module) -> dict[str, Tensor]:
        """Return what the optimizer updates: the copy's parameters, or fp32 versions of those in low precision."""
        own = dict(self.module.named_parameters())
        if self.precision not in LOW_PRECISIONS:
            return dict(own)
        return {
            name: p.detach().to(self.device, torch.float32, copy=True).requires_grad_(p.requires_grad)
            for name, p in module.named_parameters()
            if name in own
        }

    @torch.no_grad()
    def _show(self, values: Mapping[str, Tensor]) -> None:
        """Make forward and backward use these values of the parameters."""
        for name, p in self.module.named_parameters():
            p.copy_(values[name])

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the gradients of parameters in low precision to their masters', and take sparse ones."""
        for name, p in self.module.named_parameters():
            master = self.masters[name]
            if p.grad is not None and p.grad.is_sparse:
                self._looked_up.take(name, p, master.dtype)
            if p is not master and p.grad is not None:
                master.grad = p.grad.to(master.dtype) + (0 if master.grad is None else master.grad)
                p.grad = None

    def _update(self, given: float | Settings | None) -> None:
        assert self.optimizer is not None
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.clip_norm)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(list(self.masters.values()), self.clip_value)
        for group in self.optimizer.param_groups:
            if given is not None:
                group.update({"lr": given} if isinstance(given, float | int) else given[group["number"]])
        self._looked_up.make_sparse(self.optimizer, self.masters)
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                if p is not self.masters[name]:
                    p.copy_(self.masters[name])

    @torch.no_grad()
    def _take_average(self) -> None:
        """Let the average take up the parameters after an update, as the options of ``averaging`` say."""
        if self.average is None or self.averaging is None:
            return
        steps = self.step_index + 1 - self.averaging.ema_start
        if steps <= 0:
            for mine, p in zip(self.average.parameters(), self.masters.values(), strict=True):
                mine.copy_(p)
        elif steps % self.averaging.ema_every == 0:
            self.average.update_parameters(nn.ParameterList(self.masters.values()))

    def _fields(self, batch: Fields) -> dict[str, Tensor]:
        fields = {k: cast_field(v.to(self.device), self.precision) for k, v in batch.items()}
        sizes = {k: v.shape[0] for k, v in fields.items() if has_rows(k)}
        if not sizes or len(set(sizes.values())) > 1:
            raise ShardwiseError(f"the fields of a batch must have one number of rows; found {sizes}")
        return fields


def averaged_model(choice: Averaging, masters: Mapping[str, Tensor]) -> AveragedModel:
    """Return torch's average of parameters, with its own function for the decay, or one with a decay that warms up."""
    assert choice.ema is not None
    most = choice.ema

    def warming(average: Tensor, current: Tensor, number: Tensor) -> Tensor:
        decay = min(most, (1 + int(number)) / (10 + int(number)))
        return decay * average + (1 - decay) * current

    held = nn.ParameterList(masters.values())
    if choice.ema_warmup:
        return AveragedModel(held, avg_fn=warming)  # type: ignore[arg-type]
    return AveragedModel(held, multi_avg_fn=get_ema_multi_avg_fn(most))  # type: ignore[no-untyped-call]


def plain_optimizer(choice: OptimizerChoice) -> OptimizerFactory:
    """Return a maker of the optimizers that ``choice`` names, neither fused nor over lists: torch's own, and those of
    this package that torch has not."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        plain: dict[int, list[dict[str, Any]]] = {}
        own: dict[torch.optim.Optimizer, list[dict[str, Any]]] = {}
        for group in groups:
            part = group.get("number", 0) // 2
            if (theirs := choice.parts[part].own) is not None:
                own.setdefault(theirs.prototype, []).append(group)
            else:
                plain.setdefault(choice.kind(part), []).append(group)
        every = [_plain_part(choice.parts[part])(members) for part, members in plain.items()]
        return InTurn([*every, *(_own(choice, members) for members in own.values())])

    return make


def _own(choice: OptimizerChoice, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the user's own class over all of these groups together."""
    each = [(choice.parts[group["number"] // 2].own, group) for group in groups]
    found: torch.optim.Optimizer = each[0][0].over({own.group: group["params"] for own, group in each})
    for made, (_, group) in zip(found.param_groups, each, strict=True):
        made["number"] = group["number"]
    return found


def _plain_part(choice: OptimizerChoice) -> OptimizerFactory:
    """Return a maker of the optimizer of one part of a choice."""
    classes: dict[str, Any] = {
        "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop,
        "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "adamax": torch.optim.Adamax,
        "adadelta": torch.optim.Adadelta, "asgd": torch.optim.ASGD, "rprop": torch.optim.Rprop, "lion": Lion,
        "sparse_adam": torch.optim.SparseAdam,
        "muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor, "lamb": Lamb, "shampoo": Shampoo,
    }  # fmt: skip
    make = classes[choice.name]
    legal = [name for name in inspect.signature(make).parameters if name not in ("params", "foreach")]
    options = {name: value for name in legal if (value := getattr(choice, name, None)) is not None}
    if "foreach" in inspect.signature(make).parameters:
        options["foreach"] = False
    return lambda groups: make(groups, **options)


class InTurn(torch.optim.Optimizer):
    """Several optimizers, each of parameters of its own, which take their steps one after the other."""

    def __init__(self, each: Sequence[torch.optim.Optimizer]) -> None:
        self.each = each
        super().__init__([group for one in each for group in one.param_groups], {})
        self.param_groups = [group for one in each for group in one.param_groups]  # the very ones

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()


def on_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors, on the host."""
    return {name: value.cpu() for name, value in values.items()}


def _copy(module: nn.Module, precision: str, device: torch.device) -> nn.Module:
    """Return a copy of ``module`` on ``device`` in ``precision``; shared parameters and buffers stay shared."""
    dtype = COMPUTE_DTYPE[precision]
    keep = batch_norm_parameters(module) if precision in LOW_PRECISIONS else set()
    memo: dict[int, Any] = kept_tensors(module)
    for p in module.parameters():
        to = torch.float32 if id(p) in keep else dtype
        value = p.detach().to(device, to if p.is_floating_point() else p.dtype, copy=True)
        memo[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = cast_buffer(b.detach().to(device, copy=True), precision)
    found, own = copy.deepcopy(module, memo), dict(module.named_parameters())
    for name, p in found.named_parameters():
        if not p.is_leaf:  # of a ScriptModule, whose copy knows no memo
            p.detach_()
            p.data = own[name].detach().to(device, dtype, copy=True)
            p.requires_grad_(own[name].requires_grad)
    return found


def _groups(parameters: Mapping[str, Tensor], group_of: Callable[[str, tuple[int, ...]], int]) -> list[dict[str, Any]]:
    """Return the parameter groups with their numbers; those of odd numbers have no weight decay."""
    found: dict[int, dict[str, Any]] = {}
    for name, p in parameters.items():
        if p.requires_grad:
            number = int(group_of(name, tuple(p.shape)))
            found.setdefault(number, {"params": [], "number": number})["params"].append(p)
    for number, group in found.items():
        if number % 2:
            group["weight_decay"] = 0.0
    return [found[number] for number in sorted(found)]


def _rows(fields: Fields) -> int:
    return next(v.shape[0] for k, v in fields.items() if has_rows(k))
