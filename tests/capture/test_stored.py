"""Captures on disk: a second start does not export again, and never believes a capture of something else."""

import contextlib
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.capture import stored
from shardwise.capture.capture import capture
from shardwise.capture.encoding import NotEncoded, _function, decoded, encoded
from shardwise.capture.forms import Dims
from shardwise.capture.outputs import Wanted
from shardwise.core.errors import ConfigError
from shardwise.graph.captured import Captured
from shardwise.graph.functional import functionalise
from shardwise.graph.specialised import specialised

SCALE = 2.0
VARIES: Dims = {"x": frozenset({1, 2})}


class Net(nn.Module):
    """It has a buffer that forward writes, one that it reads, a constant, dropout and a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.arange(6.0))
        self.power = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.conv(x.transpose(1, 2))) + self.shift[:, None]
        with torch.no_grad():
            weight = h.mean((1, 2), keepdim=True).exp()
        h = F.dropout(h * weight * torch.tensor([3.0, 4.0])[0], 0.1, self.training)
        h = h.view(h.shape[0], 2, 3, -1).flatten(1, 2) ** self.power * SCALE
        return F.cross_entropy(self.head(h.mean(-1)), y)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.straight = nn.Linear(4, 3), True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.mean(1)
        return F.cross_entropy(self.head(Straight.apply(h) if self.straight else h.round()), y)


def batch(length: int = 5) -> dict[str, Tensor]:
    return {"x": torch.randn(4, length, 4), "y": torch.tensor([0, 1, 2, 0])}


def lines(captured: Captured) -> list[tuple[Any, ...]]:
    graph = functionalise(captured).graph
    return [(n.op, str(n.target), n.args, n.kwargs, n.meta.get("stack_trace"), _shape(n)) for n in graph.nodes]


def _shape(node: torch.fx.Node) -> list[str]:
    value = node.meta.get("val")
    return [str(one.shape) for one in (value if isinstance(value, tuple) else [value]) if isinstance(one, Tensor)]


def texts(captured: Captured) -> list[tuple[str, ...]]:
    return [tuple(map(str, one)) for one in lines(captured)]


def serve_the_same(first: Captured, second: Captured) -> None:
    """Assert that two captures with symbolic sizes give the same graphs for other lengths."""
    for length in (3, 9):
        shapes = {name: tuple(value.shape) for name, value in batch(length).items()}
        of_first, of_second = specialised(first, shapes), specialised(second, shapes)
        assert of_first is not None
        assert of_second is not None
        assert texts(of_second) == texts(of_first)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(stored.SWITCH, str(tmp_path / "captures"))
    return tmp_path / "captures"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that have been exported, but for the one whose symbols a decoder takes."""
    found: list[str] = []
    export = torch.export.export

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__ != "_First":
            found.append(type(module).__name__)
        return export(module, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", noted)
    return found


def test_a_second_capture_is_read_and_is_the_same(folder: Path, exported: list[str]) -> None:
    first = capture(Net(), batch())
    second = capture(Net(), batch())
    assert len(exported) == 1
    assert texts(second) == texts(first)
    for name in ("parameters", "buffers", "fields", "rows", "trainable", "notes", "precision", "names"):
        assert getattr(second, name) == getattr(first, name), name
    assert second.constants.keys() == first.constants.keys()
    assert all(torch.equal(value, first.constants[name]) for name, value in second.constants.items())
    assert second.values.keys() == first.values.keys()


def test_a_capture_with_symbolic_sizes_serves_other_shapes(folder: Path, exported: list[str]) -> None:
    first = capture(Net(), batch(5), varies=VARIES)
    second = capture(Net(), batch(7), varies=VARIES)
    assert len(exported) == 1
    serve_the_same(first, second)


CHANGES: dict[str, Callable[[Net], object]] = {
    "an attribute": lambda net: setattr(net, "power", 2.0),
    "a mode": lambda net: net.eval(),
    "a probability": lambda net: setattr(net.norm, "eps", 1e-3),
    "the length of a buffer": lambda net: net.register_buffer("shift", torch.zeros(1)),
    "a parameter that no longer learns": lambda net: net.head.requires_grad_(False),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_model_is_captured_anew(folder: Path, exported: list[str], what: str) -> None:
    capture(Net(), batch())
    net = Net()
    CHANGES[what](net)
    capture(net, batch(), training=net.training)
    assert len(exported) == 2


def test_a_changed_global_is_seen(folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    capture(Net(), batch())
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    changed = capture(Net(), batch())
    assert len(exported) == 2
    assert any("3.0" in str(line) for line in texts(changed))


@pytest.mark.slow
def test_what_has_a_backward_of_its_own_is_not_kept(folder: Path, exported: list[str]) -> None:
    for _ in range(2):
        capture(Rounded(), batch())
    assert len(exported) == 2
    plain = Rounded()
    plain.straight = False
    capture(plain, batch())
    capture(Rounded(), batch())  # whose ops are the same: what they give no gradient to is not
    assert len(exported) == 4


def scale() -> float:
    """Return a number that no look into what forward reads in Python shows."""
    return logging.getLogger("scale").level / 10 or 2.0


def hide(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Let :func:`scale` return another number."""
    monkeypatch.setattr(logging.getLogger("scale"), "level", int(10 * value))


class Deciding(nn.Module):
    """It checks its labels, cuts its batch to a length that is in it, and takes a branch by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if y.max() >= 3:
            raise ValueError("a label that is no class")
        h = x[:, : int(mask.sum(1).max())]
        h = h * mask[:, : h.shape[1], None] if (mask[:, 0] == 0).any() else h * scale()
        h = self.head(h.mean(1))
        if not torch.isfinite(h).all():
            raise ValueError("not finite")
        return F.cross_entropy(h, y)


def masked(length: int = 3, first: bool = True) -> dict[str, Tensor]:
    mask = (torch.arange(5) < length).repeat(4, 1)
    mask[1, 0] = first
    return {**batch(), "mask": mask.long()}


def read_in(captured: Captured) -> list[tuple[Any, ...]]:
    return [one[1:] for one in captured.reads]


def test_what_reads_its_batch_is_kept_by_what_it_reads(folder: Path, exported: list[str]) -> None:
    first = {(n, one): capture(Deciding(), masked(n, one)) for n, one in ((3, True), (3, False), (4, True))}
    before = len(exported)
    for (n, one), known in first.items():
        second = capture(Deciding(), masked(n, one))
        assert read_in(second) == read_in(known)
        assert texts(second) == texts(known)
        assert second.notes == known.notes
    assert len(exported) == before
    assert len({str(texts(one)) for one in first.values()}) == 3
    capture(Deciding(), masked(2))
    assert len(exported) == before + 1


def test_what_reads_its_batch_is_told_by_what_nobody_sees(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(Deciding(), masked())
    hide(monkeypatch, 3.0)
    before = len(exported)
    changed = capture(Deciding(), masked())
    assert len(exported) == before + 1
    assert any("3.0" in str(line) for line in texts(changed))


@pytest.mark.quick(1)
@pytest.mark.parametrize("data", [b"", b"-99", b"99", b"\xff", b"0"])
def test_a_way_that_leads_nowhere_is_not_taken(folder: Path, exported: list[str], data: bytes) -> None:
    known = capture(Deciding(), masked())
    for one in folder.iterdir():
        if one.suffix == stored.WAY:
            one.write_bytes(data)
    found = capture(Deciding(), masked())
    assert texts(found) == texts(known)
    assert read_in(found) == read_in(known)


def highest(scores: Tensor, bias: float) -> Tensor:
    """Return a number for each row, which is found by reading values."""
    return torch.tensor([bias * row.index(max(row)) for row in scores.tolist()]).to(scores)


class Parted(nn.Module):
    """A statement and a function of it read values that follow from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other, self.last = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.head(x.mean(1))
        one, two = (h, self.other(x.mean(1))) if scale() < 3 else (self.other(x.mean(1)), h)
        if one.norm() > two.norm():
            one = 2 * one
        return F.cross_entropy(
            self.last(one) * (1 + highest(two.detach(), scale() if scale() < 3 else 2.0)[:, None]), y
        )


class Writing(Parted):
    """The same, in place."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = self.head(x.mean(1)), self.other(x.mean(1))
        if one.norm() > two.norm():
            one *= 2
        return F.cross_entropy(self.last(one) * (1 + highest(two.detach(), 2.0)[:, None]), y)


def names_in(captured: Captured) -> list[str]:
    return [one.form() for one in captured.functions]


@pytest.mark.parametrize("model", [Parted, Writing])
def test_what_is_captured_around_parts_is_kept(folder: Path, exported: list[str], model: type[nn.Module]) -> None:
    first = capture(model(), batch())
    before = len(exported)
    assert len(first.functions) == 2
    second = capture(model(), batch())
    assert len(exported) == before
    assert texts(second) == texts(first)
    assert names_in(second) == names_in(first)
    assert second.notes == first.notes
    rows = torch.rand(4, 3, requires_grad=True)
    for one, other in zip(first.functions, second.functions, strict=True):
        tensors = [rows] if one.title == "highest" else [torch.tensor(True), rows]
        assert all(torch.equal(*pair) for pair in zip(one(*tensors), other(*tensors), strict=True))


def mean_above(h: Tensor) -> Tensor:
    return h * (2 if h.detach().mean().item() > 0 else 1)


def written_above(h: Tensor) -> Tensor:
    return mean_above(h) + 1


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], times: float = 1.0) -> None:
        super().__init__()
        self.head, self.last, self.function, self.times = nn.Linear(4, 3), nn.Linear(3, 3), function, times

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.head(x.mean(1)) * self.times
        h = self.function(h)
        return F.cross_entropy(self.last(h), y)


@pytest.mark.slow
def test_ways_of_a_model_that_reads_something_else_in_python_are_kept_apart(folder: Path) -> None:
    def ways() -> int:
        return sum(one.suffix == stored.WAY for one in folder.iterdir())

    for number, one in enumerate([Calling(mean_above), Calling(written_above), Calling(mean_above, 2.0)], 1):
        capture(one, batch())
        capture(one, batch())
        assert ways() == number


class Packed(nn.Module):
    """It puts the words of all rows one behind the other, as many as a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        words = self.first(x.flatten(0, 1).index_select(0, mask.flatten().nonzero().squeeze(-1)))
        h = self.second(words).reshape(words.shape[0], 2, 2)
        lengths = mask.sum(1).tolist()
        parts = torch.split(h if max(lengths) < 5 else h / 5, lengths)
        return F.cross_entropy(self.head(torch.stack([one.sum(0) for one in parts]).flatten(1)), y)


def test_a_number_that_is_found_while_capturing_is_one_on_disk_too(folder: Path, exported: list[str]) -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    given = {**batch(), "mask": mask}
    first = capture(Packed(), given, rows=4)
    exported.clear()
    second = capture(Packed(), given, rows=4)
    assert not exported and texts(second) == texts(first)
    assert [10, 2, 2] in [node.args[1] for node in first.graph.nodes if len(node.args) == 2]
    for captured in (first, second):
        assert not [node for node in captured.graph.nodes if isinstance(node.meta.get("val"), int | torch.SymInt)]


class Placed(nn.Module):
    """A function of it reads a value of each place of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.head(x)
        return F.cross_entropy(self.last(h * highest(h.detach().flatten(0, 1), 1.5).view(*x.shape[:2], 1)).sum(1), y)


@pytest.mark.slow
def test_a_part_that_takes_open_sizes_is_kept_for_all(folder: Path, exported: list[str]) -> None:
    varies: Dims = {"x": frozenset({1})}
    first = capture(Placed(), batch(5), varies=varies)
    before = len(exported)
    second = capture(Placed(), batch(8), varies=varies)
    assert len(exported) == before
    assert names_in(second) == names_in(first)
    serve_the_same(first, second)


@pytest.mark.quick(1)
@pytest.mark.parametrize("other", [2.5, 3.0])
def test_other_arguments_of_a_part_are_seen(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch, other: float
) -> None:
    """2.5 is another number that a call takes; with 3 it takes other tensors."""
    first = capture(Parted(), batch())
    before = len(exported)
    hide(monkeypatch, other)
    second = capture(Parted(), batch())
    assert len(exported) == before + 1
    assert (names_in(second), texts(second)) != (names_in(first), texts(first))


LARGER = {
    "path": [["body", 0]], "first": 0, "last": 2, "taken": ["self", "x"], "innermost": True, "tested": False,
    "written": [],
}  # fmt: skip
"""A part of other statements, as if they had stood there once."""


@pytest.mark.parametrize("change", [
    lambda one: one["functions"][0].update(name="capture"),
    lambda one: one["functions"][0].update(module="nowhere"),
    lambda one: one["functions"][-1].update(code="0", part=LARGER),
    lambda one: one["functions"][-1]["part"].update(path=[["body", 0], ["body", 9]]),
    lambda one: one["functions"][-1]["part"].update(first=7, last=7),
    lambda one: one["functions"][-1]["part"].update(taken=["one"]),
    lambda one: one.update(answers=9),
    lambda one: one.clear(),
])  # fmt: skip
@pytest.mark.quick(1)
def test_a_way_that_is_another_one_leads_nowhere(
    folder: Path, exported: list[str], change: Callable[[Any], Any]
) -> None:
    first = capture(Parted(), batch())
    (path,) = (one for one in folder.iterdir() if one.suffix == stored.WAY)
    written = json.loads(path.read_text())
    written["functions"].sort(key=lambda one: "part" in one)
    change(written)
    path.write_text(json.dumps(written))
    second = capture(Parted(), batch())
    assert sorted(names_in(second)) == sorted(names_in(first))
    assert texts(second) == texts(first)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.count = nn.Linear(4, 3), 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        h = x.mean(1)
        return F.cross_entropy(self.head(2 * h if scale() > 2 and self.count > 1 else h), y)


def test_what_changes_a_number_is_tried_again(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (capture(Counting(), batch()) for _ in range(2))
    assert len(exported) == 1
    assert texts(second) == texts(first)
    assert second.notes == first.notes
    assert "count" in second.notes[0]
    hide(monkeypatch, 3.0)  # only a second forward depends on it
    with pytest.raises(ConfigError, match="count"):
        capture(Counting(), batch())
    assert len(exported) == 2


@torch.library.custom_op("test_stored::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(doubled(self.head(x.mean(1))), y)


def test_an_op_with_a_registered_backward_is_kept(folder: Path, exported: list[str]) -> None:
    first, second = (capture(Doubling(), batch()) for _ in range(2))
    assert len(exported) == 1
    assert texts(second) == texts(first)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[::-1],
                                    lambda data: data[:-1] + bytes([data[-1] ^ 6])])  # fmt: skip
def test_a_damaged_file_is_not_believed(folder: Path, exported: list[str], damage: Callable[[bytes], bytes]) -> None:
    capture(Net(), batch())
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    capture(Net(), batch())
    assert len(exported) == 2
    capture(Net(), batch())  # and it was written again
    assert len(exported) == 2


def test_a_file_that_says_it_computes_something_else_is_not_believed(folder: Path, exported: list[str]) -> None:
    capture(Net(), batch())
    rewrite(folder, lambda written: written["results"].update({"the loss": "0" * 32}))
    capture(Net(), batch())
    assert len(exported) == 2


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change what is written in the only file of a folder, as somebody would who knows its form."""
    (path,) = folder.iterdir()
    data = path.read_bytes()[stored.DIGEST :]
    size = int.from_bytes(data[: stored.HEAD], "big")
    written = json.loads(zlib.decompress(data[stored.HEAD : stored.HEAD + size]))
    change(written)
    head = zlib.compress(json.dumps(written).encode())
    data = len(head).to_bytes(stored.HEAD, "big") + head + data[stored.HEAD + size :]
    path.write_bytes(hashlib.sha256(data).digest() + data)


def nodes(written: Any, op: str) -> list[Any]:
    return [one for one in written["graph"] if one["op"] == op]


CODE = "x=open('ran', 'w')"


@pytest.mark.parametrize("change", [
    lambda written: nodes(written, "placeholder")[-1].update(target=CODE),
    lambda written: nodes(written, "call_function")[0].update(kwargs={"dict": [[f"{CODE}, y", 1]]}),
    lambda written: [one.update(op="call_method", target=CODE) for one in nodes(written, "call_function")],
])  # fmt: skip
def test_a_file_runs_no_code(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[[Any], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    capture(Net(), batch())
    rewrite(folder, change)
    capture(Net(), batch())
    assert len(exported) == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "target",
    [["op", "load_library"], ["op", "aten.linear"], ["function", "torch", "load"], ["function", "os", "system"],
     ["function", "_operator", "methodcaller"], ["function", "_operator", "call"],
     ["higher", "__init__"]],
)  # fmt: skip
def test_a_file_can_call_nothing_but_ops(target: list[str]) -> None:
    with pytest.raises((KeyError, AttributeError)):
        _function(target)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.head(x.mean(1))
        return {"logits": h, "all": (h.exp() if bool((x * scale() > 0).any()) else h, h.sum(), x)}


@pytest.mark.parametrize("wanted", ["both", "outputs"])
def test_outputs_are_kept(folder: Path, exported: list[str], wanted: Wanted) -> None:
    def loss(out: Any, fields: Any) -> Tensor:
        return F.cross_entropy(out["logits"], fields["y"])

    first = capture(Pair(), batch(), loss=loss, wanted=wanted)
    number = len(exported)
    second = capture(Pair(), batch(), loss=loss, wanted=wanted)
    assert len(exported) == number
    assert second.outputs == first.outputs == {"logits": 0, "all": (1, 2)}
    assert texts(second) == texts(first)
    assert read_in(second) == read_in(first)
    capture(Pair(), batch(), loss=loss)
    assert len(exported) > number


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["loss", "outputs"])
def test_another_read_is_seen_where_its_answer_is_the_same(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> None:
    def loss(out: Any, fields: Any) -> Tensor:
        return F.cross_entropy(out["logits"], fields["y"])

    given = batch()
    first = capture(Pair(), given, loss=loss, wanted=wanted)
    number = len(exported)
    hide(monkeypatch, 2.5)
    second = capture(Pair(), given, loss=loss, wanted=wanted)
    assert len(exported) > number
    assert read_in(second) == read_in(first)
    assert texts(second) != texts(first)


def test_a_function_is_not_encoded() -> None:
    with pytest.raises(NotEncoded):
        encoded(capture(Rounded(), batch()))


@pytest.mark.slow
def test_the_files_used_last_stay(folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEPT", 2)
    for number, length in enumerate([3, 4, 3, 5, 3, 4]):
        capture(Net(), batch(length))
        for path in folder.iterdir():  # files differ in when they were used, also where a clock is coarse
            age = path.stat().st_mtime - 10
            os.utime(path, (age, age))
        assert len(exported) == [1, 2, 2, 3, 3, 4][number]


def test_files_that_are_no_captures_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEPT", 1)
    folder.mkdir()
    names = {"thesis.txt", "0" * 39, "0" * 40 + ".txt"}
    for one in names:
        (folder / one).write_text("")
    for length in 5, 6:
        capture(Net(), batch(length))
    assert len({one.name for one in folder.iterdir()} - names) == 1
    assert all((folder / one).exists() for one in names)


class Window(nn.Module):
    """It treats long sequences and large batches in another way, from sizes on that it reads in Python."""

    def __init__(self, width: int = 16, most: int | None = None) -> None:
        super().__init__()
        self.head, self.width, self.most = nn.Linear(4, 3), width, most

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x[:, -self.width :] if x.shape[1] > self.width else x
        if self.most is not None and x.shape[0] > self.most or x.shape[1] > int(os.environ.get("LONG", 100)):
            h = h / 2
        return F.cross_entropy(self.head(h.mean(1)), y)


@pytest.mark.parametrize("other", [{"width": 8}, {"most": 8}, {"LONG": "8"}], ids=str)
def test_another_size_from_which_on_forward_differs_is_seen(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """The sizes of a trial are smaller."""
    varies: Dims = {"x": frozenset({1})}
    capture(Window(), batch(5), varies=varies)
    if "LONG" in other:
        monkeypatch.setenv("LONG", "8")
    else:
        monkeypatch.setattr(Window.__init__, "__defaults__", tuple({"width": 16, "most": None, **other}.values()))
    assert len(exported) == 1
    capture(Window(), batch(5), varies=varies)
    number = len(exported)
    capture(Window(), batch(5), varies=varies)
    assert len(exported) == number > 1


class Switched(nn.Module):
    """It does something in Python if a number says so that no look shows, and which its names do not show either."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.head, self.what, self.count = nn.Linear(4, 4), nn.Linear(4, 3), what, 0

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = x.mean(1)
        g = self.layer(h)
        names = ["logits", "other"]
        if scale() > 2:
            if self.what == "draws":
                h = h if random.random() > -1 else 2 * h
            if self.what == "counts":
                self.count += 1
                g = 2 * g if self.count == 2 else g
            if self.what == "reads":
                g = 2 * g if 9 in y.tolist() else g
            if self.what == "asks":
                g = 2 * g if "NOWHERE" in os.environ else g
            if self.what == "cuts":
                g = g.detach().requires_grad_()
            if self.what == "names":
                names.reverse()
        return {"loss": F.cross_entropy(self.head(g), y)} | dict(zip(names, (h, g), strict=True))


@pytest.mark.parametrize("what", ["draws", "counts", "reads", "asks", "cuts", "names"])
def test_what_no_look_shows_is_seen_in_the_forward(
    folder: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    wanted: Wanted = "both" if what == "names" else "loss"
    capture(Switched(what), batch(), wanted=wanted)
    capture(Switched(what), batch(), wanted=wanted)
    assert len(exported) == 1
    hide(monkeypatch, 3.0)
    with contextlib.suppress(ConfigError):
        capture(Switched(what), batch(), wanted=wanted)
    assert len(exported) > 1


class Shy(Net):
    def extra_repr(self) -> str:
        raise RuntimeError("not ready")


def test_a_module_that_cannot_be_told_is_not_kept(folder: Path) -> None:
    assert capture(Shy(), batch()).rows is None
    assert not folder.exists()


@pytest.mark.slow
def test_there_need_be_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exported: list[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for place in ("off", "0", str(tmp_path / "file"), str(tmp_path / "file" / "captures")):
        monkeypatch.setenv(stored.SWITCH, place)
        capture(Net(), batch())
    assert len(exported) == 4
    assert not (tmp_path / "0").exists()
    monkeypatch.delenv(stored.SWITCH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.folder() == tmp_path / "shardwise" / "captures"


SCRIPT = """
import torch
from test_stored import Deciding, Net, Parted, batch, masked
from shardwise import distribute
from shardwise.capture.capture import capture
export, exported = torch.export.export, []
torch.export.export = lambda module, *a, **k: exported.append(type(module).__name__) or export(module, *a, **k)
for model, one in (Net(), batch()), (Deciding(), masked()), (Parted(), batch()):
    exported.clear()
    capture(model, one)
    print("Watched" in exported)
exported.clear()
model = torch.nn.Linear(4, 3)
model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.zero_grad()
torch.nn.functional.cross_entropy(model(batch()["x"].mean(1)), batch()["y"]).backward()
optimizer.step()
print("Watched" in exported)
"""


@pytest.mark.slow
@pytest.mark.fresh
def test_another_process_reads_it(folder: Path) -> None:
    def run(seed: str) -> str:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True, timeout=120
        ).stdout.strip()

    assert [run("1").split(), run("2").split()] == [["True"] * 4, ["False"] * 4]


def test_decoding_puts_in_the_buffers_that_are_there_now(folder: Path) -> None:
    net = Net()
    found = capture(net, batch())
    net.shift += 1
    again = decoded(json.loads(json.dumps(encoded(found))), batch(), found.constants, dict(net.named_buffers()))
    place = next(name for name, buffer in again.buffers.items() if buffer == "shift")
    assert torch.equal(again.value(place), net.shift)
