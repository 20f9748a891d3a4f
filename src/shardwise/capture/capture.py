"""Capture a module and its loss as one flat graph of ATen ops, by ``torch.export`` with a symbolic batch dim.

The capture runs on a *shadow* of the module: the same structure with uninitialised parameters of the compute dtype, so
that casts in the graph are those of the precision that trains, and nothing that the user holds is touched.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture import opened, stored
from shardwise.capture.assumed import NUMBERS
from shardwise.capture.casts import cast_buffer, shadow_dtype
from shardwise.capture.coins import Drawing
from shardwise.capture.eager_calls import EagerCall
from shardwise.capture.example import example_of, rows_seen, shaken_value
from shardwise.capture.expert_loops import LOOPS, NOTE, without_loops
from shardwise.capture.forms import NOTHING_VARIES, Dims, Form, form_of, other_forms, resized
from shardwise.capture.functions import functions_recorded, without_drawn
from shardwise.capture.hooks import refuse_module_hooks, tensor_hooks_refused
from shardwise.capture.host_draws import Drawn, seeded
from shardwise.capture.intercept import Intercept, Layer
from shardwise.capture.key_caches import NOTE as CACHES
from shardwise.capture.key_caches import without_caches
from shardwise.capture.known import Known, Tried
from shardwise.capture.lazy_zeros import lazy_zeros
from shardwise.capture.outputs import Wanted
from shardwise.capture.reads import sized
from shardwise.capture.reasons import fixed_rows, not_captured
from shardwise.capture.row_draws import assign_rows
from shardwise.capture.seen_calls import NotEager, OpenSize
from shardwise.capture.state import generators_kept, kept_tensors
from shardwise.capture.trial import RUNS, RUNS_UNSEEN, Found, apart, runs
from shardwise.capture.warned import passed_on
from shardwise.capture.ways import Ways
from shardwise.capture.wrapped import (
    InOneNumber,
    LossFunction,
    Settled,
    Watched,
    WithLoss,
    WithOutputs,
    rows_in,
    set_mode,
)
from shardwise.core.errors import ConfigError, describe
from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.specialised import put_known_numbers
from shardwise.graph.torch_private import Assumed, assumed, conversions_skipped, exporting, exports_modules_unhooked
from shardwise.graph.vmaps import without_vmaps
from shardwise.initial.copies import copied

UNSEEN = "something that no look into its attributes shows (an iterator, a clock, a state elsewhere)"


def capture(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: LossFunction | None = None,
    precision: str = "fp32",
    training: bool = True,
    rows: int | None = None,
    wanted: Wanted = "loss",
    varies: Dims = NOTHING_VARIES,
    known: Known | None = None,
    drawing: Drawing | None = None,
) -> Captured:
    """Capture ``module`` with its loss on rows like those of ``batch`` (a dict of tensors with a common first dim).

    ``rows`` asks for a static graph of exactly that many rows; without it the batch dim is symbolic where the model
    allows and otherwise static, as large as ``batch``.  ``wanted`` says whether the graph returns outputs too.  The
    dims of ``varies`` are symbolic, too, where the model allows.  What is ``known`` of its forward from earlier
    captures is not found again.  Where forward decides in Python, it is captured for the values of ``batch`` and the
    random numbers of ``drawing``.  Raises :class:`Uncapturable` with the reason where export stops.
    """
    refuse_module_hooks(module)
    looped = cached = False
    key = stored.key_of(module, batch, loss, varies, precision, training, wanted)
    numbers = {key: None, f"{key}-of-{rows_in(batch)}": rows_in(batch)} if rows is None else {f"{key}-{rows}": rows}

    def bare(trial: bool, calling: bool = False, values: int | None = None, precision: str = precision) -> Watched:
        """Return a copy of the model; ``calling`` says that functions run as written in it."""
        nonlocal looped, cached
        own = shadow(module, precision)
        if values is not None:
            fill(own, dict(module.named_parameters()), values)
        looped = without_loops(own)
        cached |= calling and wanted == "loss" and without_caches(own)
        made = (
            Watched(own, loss, precision) if wanted == "loss"
            else (InOneNumber if trial else WithOutputs)(own, loss, precision, wanted)
        )  # fmt: skip
        made.looks = not trial
        return set_mode(made, training)

    def forward(rows: int, values: int, *layers: Layer, form: Form | None = None) -> None:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), Intercept(*layers):
            own = bare(trial=True, calling=True, values=values)
            own(example_of(own, batch if form is None else resized(batch, form), rows))

    def gradients(values: int, factor: float) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]), seeded(0, 0), torch.enable_grad():  # each time the same numbers
            own = bare(trial=True, values=values, precision="fp64")
            loss = factor * own(example_of(own, batch, rows_in(batch)))
            if loss.requires_grad:
                loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in own.named_parameters() if p.grad is not None}}

    def whole(wrapped: Watched) -> Captured:
        captured = _captured(wrapped, batch, rows, varies, told)
        assign_rows(captured, lambda number, layer: forward(number, 0, layer), told)
        if captured.opened and training:
            opened.check(captured.opened, gradients)
            captured.notes.append(opened.note(captured.opened))
        return captured

    told = known or Known()
    with generators_kept():
        ways = Ways(
            module, bare, forward, batch, drawing, told, other_forms(form_of(batch), varies, told.forms),
            capture=whole,
            trial=lambda captured, wrapped, again: _trial(captured, wrapped, again, batch, told),
            # Numbers of all rows seldom fit fewer: the caller tries these rows alone.
            sole=rows is not None and rows < rows_in(batch) and bool(told.way.reads & NUMBERS),
        )  # fmt: skip
        told.forms += {form_of(batch)}.difference(told.forms)
        captured = None if key is None else ways.on_disk(key, numbers)
        if captured is None:
            captured, trial = ways.first()
            if key is not None:
                own = next(one for one, number in numbers.items() if number == captured.rows)
                ways.keep(key, own, captured, trial)
    if looped:
        captured.notes.append(NOTE)
    if captured.looped:
        captured.notes.append(LOOPS)
    eager = any(isinstance(one, EagerCall) for one in captured.functions)
    if cached and eager:  # forwards with values make none either, whatever way is found
        captured.notes.append(CACHES)
    return captured


def _trial(
    captured: Captured, wrapped: Watched, again: Watched, batch: Mapping[str, Tensor], known: Known
) -> Tried | None:
    """Return the trial that shows that what forward computes depends on nothing that it keeps in Python: an earlier one
    that serves, or a new one; None where it draws something, or changes more than numbers and words.  Raises
    :class:`ConfigError` where it does depend."""
    noted, form = wrapped.noted, form_of(batch)
    state = None if noted.before is None else noted.before.plain()
    if not (noted.changes or noted.drawn):
        for one in known.trials:
            if one.serves(captured, state, form):
                return one
    found = _check_state(captured, wrapped, again, batch)
    if not found or noted.drawn or not all(one.plain for one in noted.changes):
        return None
    number = len(found) if noted.changes else 1
    tried = Tried(state, captured.reads, captured.rows, form, found[0].results, number)
    if not noted.changes:  # else later runs may take branches by sizes of which this capture knows nothing
        known.trials.append(tried)
    return tried


def _check_state(captured: Captured, wrapped: Watched, again: Watched, batch: Mapping[str, Tensor]) -> list[Found]:
    """Raise :class:`ConfigError` where what forward computes depends on what it changes in Python, or on numbers of
    generators that are not torch's: a trial with another shadow, ``again``, shows that. Leave notes where it does not.
    Return its runs, none where they failed.

    The trial runs also where no change was seen: iterators, clocks and the like cannot be looked into."""
    changes, drawn = wrapped.noted.changes, wrapped.noted.drawn
    found: list[Found] = []
    number, settled = (RUNS, Settled(again)) if changes or drawn else (RUNS_UNSEEN, bool)
    try:
        example = example_of(again, batch, captured.rows)
        found = runs(again, again.module, example, bool(drawn), number, settled, again.calling)
        line = apart(found)
    except Exception as error:  # the user's code may do anything with what an earlier forward has left behind
        line = describe(error) if changes or drawn else None
    kept = " and ".join(name for name, one in again.module.named_buffers() if one.requires_grad)
    if line is not None and kept:
        raise ConfigError(
            f"model: forward leaves its graph in the buffer {kept} ({line}): ordinary PyTorch cannot take a second "
            "step either, for that graph has gone by then; legal: detach() what is written there"
        )
    if line is not None:
        what = ", ".join([*map(str, changes), *(f"the generator of {name}" for name in drawn)]) or UNSEEN
        legal = "buffers (self.register_buffer) in place of attributes, torch's random functions in place of Python's"
        place = f" ({line})" if line else ""
        error = Drawn if drawn and not changes else ConfigError
        raise error(f"model: what forward computes depends on {what}, which it changes{place}; legal: {legal}")
    # A flag that a first forward sets says nothing later on.
    if changed := [str(one) for one in changes if not one.of_tensors and one.after is not True]:
        captured.notes.append(
            f"forward changes {', '.join(changed)}: what it computes is the same in {len(found)} forwards, and the "
            "steps see no later values"
        )
    if drawn:
        names = " and ".join(drawn)
        captured.notes.append(
            f"forward draws from {names}: what it computes does not depend on it; the steps draw none"
        )
    return found


def _captured(
    wrapped: Watched, batch: Mapping[str, Tensor], rows: int | None, varies: Dims, known: Known
) -> Captured:  # fmt: skip
    """Capture for ``rows`` rows; without them for any number where an earlier capture could do that, or there is none,
    and otherwise for as many as ``batch`` has."""
    reason = known.fixed_rows
    if wrapped.reading is not None and sized(wrapped.reading.reads):
        reason = reason or "a part of its rows has other sizes that follow from values"
    if rows is None and reason is None:
        try:
            return _export(wrapped, batch, None, varies)
        except (ConfigError, OpenSize):
            raise
        except Exception as error:  # export raises many kinds; the static capture decides
            reason = fixed_rows(error, wrapped.module)
    number = rows_in(batch) if rows is None else rows
    try:
        captured = _export(wrapped, batch, number, varies)
    except (ConfigError, NotEager):
        raise
    except Exception as error:
        raise Uncapturable(not_captured(error, wrapped.module)) from error
    if rows is None:
        known.fixed_rows = reason
        captured.notes.append(
            f"captured for {number} rows at a time, and again for every other number that comes: {reason}"
        )
    return captured


def shadow(module: nn.Module, precision: str) -> nn.Module:
    """Return a copy of ``module`` whose parameters have the compute dtype and take no memory, as nobody touches them.

    Buffers are copies, cast as the precision asks, and other attributes are copies, too."""
    memo: dict[int, Any] = kept_tensors(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            dtype = shadow_dtype(module, name, parameter, precision)
            memo[id(parameter)] = nn.Parameter(lazy_zeros(parameter.shape, dtype), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = cast_buffer(buffer.detach().to("cpu", copy=True), precision)
    return copied(module, memo)


def fill(own: nn.Module, given: Mapping[str, Tensor], values: int) -> None:
    """Give a shadow of a module the values of these parameters (0), or others that are about as large, by number; those
    that are not there, or have none, as once training has begun, are random."""
    for index, (name, parameter) in enumerate(own.named_parameters()):
        none = name not in given or given[name].is_meta
        value = torch.zeros(parameter.shape, dtype=parameter.dtype) if none else given[name].detach()
        value = value.to("cpu", parameter.dtype, copy=True)
        parameter.data = shaken_value(value, index + values) if values or none else value


def _export(wrapped: WithLoss, batch: Mapping[str, Tensor], rows: int | None, varies: Dims) -> Captured:
    example = example_of(wrapped, batch, rows)
    shapes = None
    if rows is None or varies:
        dim = torch.export.Dim("rows", min=1, max=1 << 30)
        shapes = ({
            name: {
                **dict.fromkeys(varies.get(name, ()), torch.export.Dim.AUTO),
                **({0: dim} if rows is None and has_rows(name) else {}),
            } or None for name in example
        },)  # fmt: skip
    calls = wrapped.calling if isinstance(wrapped, Watched) else None
    if calls is not None:
        calls.see(rows_seen(rows), forms=bool(varies))
    with (
        passed_on() as warned, _quiet(), functions_recorded() as recorder, exporting(), tensor_hooks_refused(),
        exports_modules_unhooked(), conversions_skipped(),
        contextlib.nullcontext() if calls is None else calls.ops_of(recorder.functions),
    ):  # fmt: skip
        program = torch.export.export(wrapped, (example,), strict=False, dynamic_shapes=shapes)
    if any(isinstance(constant, Tensor) and constant.is_meta for constant in program.constants.values()):
        raise Uncapturable(
            "it computes with a tensor without memory, which its constructor made and no attribute holds"
        )
    without_drawn(program.graph_module.graph)
    without_vmaps(program.graph_module)
    put_known_numbers(program.graph_module)
    places = program.graph_module.graph.find_nodes(op="placeholder")
    if others := [node for node in places if not isinstance(node.meta.get("val"), Tensor)]:
        raise Uncapturable(
            f"it computes with an object that is no tensor, such as a torch.Generator ({others[0].name})"
        )
    signature = program.graph_signature
    canonical = _canonical(wrapped)
    order = list(example)
    return Captured(
        graph=program.graph_module.graph,
        owner=program.graph_module,
        parameters={k: canonical[v] for k, v in signature.inputs_to_parameters.items()},
        buffers={k: canonical[v] for k, v in signature.inputs_to_buffers.items()},
        constants={k: program.constants[v] for k, v in signature.inputs_to_lifted_tensor_constants.items()},
        fields=dict(zip(signature.user_inputs, order, strict=True)),
        rows=rows,
        precision=wrapped.precision,
        trainable={canonical[k]: p.requires_grad for k, p in wrapped.named_parameters(remove_duplicate=False)},
        values={
            k: program.state_dict[v] if v in program.state_dict else program.constants[v]
            for k, v in signature.inputs_to_buffers.items()
        },
        functions=list(recorder.functions),
        opened=list(recorder.opened),
        looped=wrapped.noted.looped if isinstance(wrapped, Watched) else 0,
        assumed=assumed(places[-1].meta["val"]) if varies else Assumed(),
        notes=list(warned),
        names={k.removeprefix("module."): canonical[k] for k, _ in wrapped.named_parameters(remove_duplicate=False)},
        outputs=wrapped.outputs.structure if isinstance(wrapped, WithOutputs) else None,
    )


def _canonical(wrapped: WithLoss) -> dict[str, str]:
    """Return, by names under the wrapper, the first name, in the user's module, of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for kind in (wrapped.named_parameters, wrapped.named_buffers):
        for name, value in kind(remove_duplicate=False):
            names[name] = first.setdefault(id(value), name.removeprefix("module."))
    return names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence export, which logs every guard of a failed symbolic capture; the reason is kept in the exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it also prints the graph that it had so far
            yield
    finally:
        logging.disable(before)
