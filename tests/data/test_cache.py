"""The cache of tokens: made once, the same for any number of workers, whole or not at all."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from settled import settle

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.data import cache, documents, fingerprint, tokenise, worker
from shardwise.data.cache import TokenCache
from shardwise.data.corpus import Corpus, open_corpus
from shardwise.data.tokenizer import JsonTokenizer


class Work:
    """Counts the files hashed and the pieces tokenised."""

    hashed = 0
    pieces = 0

    def take(self) -> tuple[int, int]:
        found = (self.hashed, self.pieces)
        self.hashed = self.pieces = 0
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted, hash_file, do = Work(), fingerprint._hash_file, tokenise.tokenise

    def hashing(*arguments: Any) -> Any:
        counted.hashed += 1
        return hash_file(*arguments)

    def doing(*arguments: Any) -> Any:
        counted.pieces += 1
        return do(*arguments)

    monkeypatch.setattr(fingerprint, "_hash_file", hashing)
    monkeypatch.setattr(tokenise, "tokenise", doing)
    return counted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hundred documents of odd sizes."""
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(100):
        path = root / f"{number:03}.txt"
        path.write_text(f"document {number} " * (1 + number * number % 37))
        settle(path)
    return root


def text_of(found: Corpus | TokenCache, side: str) -> bytes:
    tokens = (found.cache if isinstance(found, Corpus) else found).tokens(side)[0]
    return tokens.tobytes()


def read_all(found: Corpus) -> list[bytes]:
    """All documents of both sides."""
    return [part for side in ("train", "validation") for part in text_of(found, side).split(b"\0")[:-1]]


# --- what is in it ---


def test_every_document_is_there_once_and_ended(folder: Path) -> None:
    found = open_corpus(str(folder), validation=0.2)
    whole = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert sorted(read_all(found)) == sorted(whole)
    train = text_of(found, "train").split(b"\0")
    assert train[-1] == b""
    assert [text for text in whole if text in set(train)] == train[:-1]  # in the order of paths
    assert found.cache.train.documents + found.cache.validation.documents == 100
    assert found.cache.train.tokens == len(text_of(found, "train"))
    assert 5 <= found.cache.validation.documents <= 40
    index = json.loads((found.cache.folder / "index.json").read_text())
    path, size, changed, digest = index["files"][7]
    assert (path, size, changed) == (str(folder / "007.txt"), (folder / "007.txt").stat().st_size, 10**18)
    assert digest == hashlib.sha256((folder / "007.txt").read_bytes()).hexdigest()
    assert (index["dtype"], index["end"], index["tokenizer"], index["fraction"]) == ("uint8", 0, "bytes", 0.2)


def test_the_side_of_a_document_depends_on_its_content_alone(folder: Path, tmp_path: Path) -> None:
    before = set(text_of(open_corpus(str(folder), validation=0.3), "validation").split(b"\0"))
    rows = tmp_path / "rows.jsonl"
    texts = [path.read_text() for path in sorted(folder.iterdir(), reverse=True)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["one more", *texts]))
    after = set(text_of(open_corpus(str(rows), validation=0.3), "validation").split(b"\0"))
    assert after - {b"one more"} == before
    smaller = set(text_of(open_corpus(str(folder), validation=0.1), "validation").split(b"\0"))
    assert smaller < before  # a larger fraction sets the same documents apart, and more


def test_the_share_of_validation(tmp_path: Path) -> None:
    sides = [worker.side(hashlib.sha256(str(n).encode()).digest(), 0.25) for n in range(20_000)]
    assert abs(np.mean(sides) - 0.25) < 0.01
    assert not any(worker.side(hashlib.sha256(str(n).encode()).digest(), 0.0) for n in range(1000))


def test_one_document_is_not_set_apart(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"only document {number}")
        found = open_corpus(str(path), validation=0.9)
        assert text_of(found, "train") == path.read_bytes() + b"\0"
        assert (found.cache.train.documents, found.cache.validation.tokens) == (1, 0)
        assert found.validation(4) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_any_number_of_workers_gives_the_same_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_json: str, kind: str
) -> None:
    monkeypatch.setattr(documents, "PIECE", 3000)
    (folder / "long.txt").write_text("a longer document, cut into pieces\n" * 1000)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n} " * (n % 9)}) + "\n" for n in range(2000)))
    name = "bytes" if kind == "bytes" else tokenizer_json
    found = [
        open_corpus(
            str(folder), tokenizer=name, validation=0.2, cache_dir=str(tmp_path / f"cache{workers}"), workers=workers
        )
        for workers in (1, 2, 5)
    ]
    for side in ("train", "validation"):
        one, *others = [text_of(each, side) for each in found]
        assert len(one) > 1000
        assert all(other == one for other in others)
    assert sorted(path.name for path in found[1].cache.folder.iterdir()) == [
        "index.json",
        "train.bin",
        "validation.bin",
    ]
    if kind == "json":
        made = JsonTokenizer(name)
        tokens = found[0].cache.tokens("train")[0]
        assert tokens.dtype == np.uint16
        first = tokens[: int(np.flatnonzero(tokens == made.end)[0])]
        assert made.decode(first) in {path.read_text() for path in folder.iterdir()}
        assert int((tokens == made.end).sum()) == found[0].cache.train.documents
        longest = max(np.split(tokens, np.flatnonzero(tokens == made.end)), key=len)
        assert made.decode(longest[longest != made.end]) == (folder / "long.txt").read_text()


def test_progress_ends_with_all(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    open_corpus(str(folder), progress=lambda *each: calls.append(each))
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert calls[-1] == (total, total)
    assert (total // 2, total) in calls  # hashed, not tokenised yet
    assert calls == sorted(calls)
    calls.clear()
    open_corpus(str(folder), progress=lambda *each: calls.append(each))
    assert calls == []


# --- when it is made ---


def test_it_is_made_once(folder: Path, work: Work) -> None:
    first = open_corpus(str(folder))
    assert work.take() == (100, 1)
    second = open_corpus(str(folder))
    assert work.take() == (0, 0)
    assert second.cache.folder == first.cache.folder
    path = folder / "050.txt"
    os.utime(path, ns=(11 * 10**17, 11 * 10**17))  # touched, not changed
    assert open_corpus(str(folder)).cache.folder == first.cache.folder
    assert work.take() == (1, 0)
    assert open_corpus(str(folder)).cache.folder == first.cache.folder
    assert work.take() == (0, 0)


def test_a_changed_byte_makes_another(folder: Path, work: Work) -> None:
    first = open_corpus(str(folder))
    path = folder / "050.txt"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    work.take()
    second = open_corpus(str(folder))
    assert work.take() == (1, 1)
    assert second.cache.folder != first.cache.folder
    assert b"!" in text_of(second, "train")
    assert b"!" not in text_of(first, "train")  # what is open stays as it was
    assert second.train(16).digest != first.train(16).digest


def test_a_change_that_keeps_size_and_time_of_a_recent_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("first")
    changed = path.stat().st_mtime_ns
    open_corpus(str(path))
    path.write_text("other")
    os.utime(path, ns=(changed, changed))
    assert text_of(open_corpus(str(path)), "train") == b"other\0"


def test_what_else_makes_another(folder: Path, tmp_path: Path, tokenizer_json: str, work: Work) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "aaaa", "b": "bbbb"}\n')
    other_end = str(tmp_path / "t.json")
    Path(other_end).write_text(Path(tokenizer_json).read_text().replace("<|endoftext|>", "<eos>"))
    found = [
        open_corpus(str(folder)),
        open_corpus(str(folder), validation=0.5),
        open_corpus(str(folder), tokenizer=tokenizer_json),
        open_corpus(str(folder), tokenizer=other_end),
        open_corpus(str(rows)),
        open_corpus(str(rows), field="b"),
        open_corpus([str(rows), str(folder)]),
        open_corpus([str(folder), str(rows)]),
    ]
    assert len({each.cache.folder for each in found}) == len(found)
    work.take()
    assert open_corpus(str(folder), field="no matter").cache.folder == found[0].cache.folder
    assert work.take() == (0, 0)
    moved = folder.rename(tmp_path / "moved")
    assert open_corpus(str(moved)).cache.folder == found[0].cache.folder  # names do not count
    assert work.take() == (100, 0)


@pytest.mark.parametrize("damage", ["short", "long", "index", "value", "no index", "no tokens", "format"])
def test_a_damaged_cache_is_made_again(folder: Path, work: Work, damage: str) -> None:
    before = open_corpus(str(folder), validation=0.1)
    assert before.cache.notices == ()
    whole, place = text_of(before, "train"), before.cache.folder
    index = place / "index.json"
    if damage in ("short", "long"):
        (place / "train.bin").write_bytes(whole[:-1] if damage == "short" else whole + b"x")
    elif damage == "index":
        index.write_text(index.read_text()[:50])
    elif damage == "value":
        index.write_text(index.read_text().replace('"end": 0', '"end": 1'))
    elif damage == "no tokens":
        (place / "validation.bin").unlink()
    elif damage == "format":
        index.write_text(index.read_text().replace('"format": 2', '"format": 1'))
    else:
        index.unlink()
    work.take()
    again = open_corpus(str(folder), validation=0.1)
    assert work.take() == (0, 1)
    assert text_of(again, "train") == whole
    assert len(again.cache.notices) == 1
    assert str(place) in again.cache.notices[0]
    assert open_corpus(str(folder), validation=0.1).cache.notices == ()


def test_a_damaged_memory_of_digests_costs_time_only(folder: Path, tmp_path: Path, work: Work) -> None:
    open_corpus(str(folder), cache_dir=str(tmp_path / "c"))
    (memory,) = (tmp_path / "c" / "files").iterdir()
    for content in ("{", "[]", '{"a": 3}', '{"a": [1]}'):
        memory.write_text(content)
        work.take()
        open_corpus(str(folder), cache_dir=str(tmp_path / "c"))
        assert work.take() == (100, 0)


# --- what goes wrong ---

MAKE = """
import sys
from shardwise.data import documents, tokenise
from shardwise.data.corpus import open_corpus
documents.PIECE = 2000
import time
append = tokenise._Joined.append
def slow(self, part, done):
    append(self, part, done)
    print("piece", flush=True)
    time.sleep({pause})
tokenise._Joined.append = slow
found = open_corpus({source!r}, cache_dir={cache!r}, validation=0.1, workers={workers})
print("done", found.cache.train.sha256, found.cache.folder, flush=True)
"""


def start(source: Path, cache_dir: Path, *, pause: float, workers: int) -> subprocess.Popen[str]:
    code = MAKE.format(source=str(source), cache=str(cache_dir), pause=pause, workers=workers)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def children(pid: int) -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.fresh
def test_a_killed_process_leaves_nothing_that_looks_whole(folder: Path, tmp_path: Path, workers: int) -> None:
    import psutil

    root = tmp_path / "cache"
    process = start(folder, root, pause=30, workers=workers)
    assert process.stdout is not None
    assert process.stdout.readline() == "piece\n"
    (key,) = [path.name.removesuffix(".part") for path in root.glob("*.part")]
    helpers = children(process.pid)
    assert len(helpers) == (0 if workers == 1 else workers)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (root / key).exists()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in helpers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    found = open_corpus(str(folder), cache_dir=str(root), validation=0.1)  # the lock is free, what was begun is gone
    assert found.cache.folder == root / key
    assert found.cache.notices == ()
    assert sorted(read_all(found)) == sorted(path.read_bytes() for path in folder.iterdir())
    assert not list(root.glob("*.part"))


def test_of_two_processes_one_makes_it_and_the_other_waits(folder: Path, tmp_path: Path) -> None:
    both = [start(folder, tmp_path / "cache", pause=0.01, workers=1) for _ in range(2)]
    printed = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert sorted(len(lines) > 1 for lines in printed) == [False, True]  # pieces were made by one
    assert printed[0][-1] == printed[1][-1]
    assert printed[0][-1].startswith("done")


def test_a_worker_that_dies_is_an_error_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", 2000)
    do = tokenise._Processes._do

    def kill_first(self: Any, job: Any) -> Any:
        if job.out.endswith("part-3"):
            for process in self._processes:
                process.kill()
        return do(self, job)

    monkeypatch.setattr(tokenise._Processes, "_do", kill_first)
    with pytest.raises(ShardwiseError, match=r"exit code -9|stopped"):
        open_corpus(str(folder), cache_dir=str(tmp_path / "c"), workers=2)
    assert [path.name for path in (tmp_path / "c").iterdir() if not path.name.endswith(".lock")] == ["files"]


@pytest.mark.parametrize("workers", [1, 3])
def test_errors_of_workers_reach_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(documents, "PIECE", 50)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' * 40 + '{"txt": "bad"}\n' + '{"text": "good"}\n' * 40)
    with pytest.raises(ConfigError, match=r"rows.jsonl:41: no .text."):
        open_corpus(str(path), cache_dir=str(tmp_path / "c"), workers=workers)
    assert not list((tmp_path / "c").glob("*.part"))


def test_files_that_change_while_they_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do = tokenise.tokenise

    def meddle(*arguments: Any) -> Any:
        (folder / "003.txt").write_text("changed meanwhile")
        return do(*arguments)

    monkeypatch.setattr(tokenise, "tokenise", meddle)
    with pytest.raises(ConfigError, match=r"003.txt changed while it was read"):
        open_corpus(str(folder), cache_dir=str(tmp_path / "c"))
    assert not list((tmp_path / "c").glob("*/train.bin"))


def test_files_that_are_gone_while_they_are_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do = tokenise.tokenise

    def meddle(*arguments: Any) -> Any:
        (folder / "003.txt").unlink()
        return do(*arguments)

    monkeypatch.setattr(tokenise, "tokenise", meddle)
    with pytest.raises(ConfigError, match=r"data.source: cannot read .*003.txt: No such file"):
        open_corpus(str(folder), cache_dir=str(tmp_path / "c"))


def test_folders_that_cannot_keep_tokens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data.cache_dir = .*/file/x: cannot keep tokens there: Not a directory"):
        open_corpus(str(folder), cache_dir=str(tmp_path / "file" / "x"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "train.bin")

    monkeypatch.setattr(tokenise._Joined, "append", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        open_corpus(str(folder), cache_dir=str(tmp_path / "c"))
    assert not list((tmp_path / "c").glob("*.part"))


def test_too_little_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("12345678")
    found = open_corpus(str(path))
    assert len(found.train(8)) == 1
    with pytest.raises(
        ConfigError, match=r"data.source: .*t.txt has 9 tokens, too few.*sequence_length = 9 \(it takes 10\)"
    ):
        found.train(9)


def test_too_much_validation(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 20)
    found = open_corpus(str(tmp_path), validation=0.99)
    with pytest.raises(ConfigError, match="validation.share = 0.99: it leaves .* documents to train on"):
        found.train(64)


def test_opening_is_fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_corpus("stdlib", validation=0.01, cache_dir=str(tmp_path))
    times = []
    for _ in range(5):
        start = time.process_time()
        open_corpus("stdlib", validation=0.01, cache_dir=str(tmp_path)).train(128)
        times.append(time.process_time() - start)
    assert min(times) < 0.1


def test_names_that_are_no_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "corpus")
    os.mkdir(folder)
    with open(folder + b"/\xff.txt", "wb") as file:
        file.write(b"a file whose name is not UTF-8")
    for workers in (1, 2):
        found = open_corpus(str(tmp_path / "corpus"), cache_dir=str(tmp_path / f"c{workers}"), workers=workers)
        assert text_of(found, "train") == b"a file whose name is not UTF-8\0"
    assert cache.default_cache_dir() == str(tmp_path / "xdg" / "shardwise" / "tokens")


@pytest.mark.fresh
def test_tokenising_needs_no_torch() -> None:
    code = "import sys, shardwise.data.worker, shardwise.data.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_document_of_a_mixture_stays_on_its_side(tmp_path: Path) -> None:
    """It may be in another source of the mixture, and would be trained on here and validated on there."""
    path = next(
        path for n in range(99) for path in [tmp_path / f"{n}.txt"]
        if path.write_text(f"document {n}") and worker.side(hashlib.sha256(path.read_bytes()).digest(), 0.5)
    )  # fmt: skip
    text = path.read_bytes() + b"\0"
    shared = open_corpus(str(path), validation=0.5, alone=False)
    assert (text_of(shared, "train"), text_of(shared, "validation")) == (b"", text)
    assert shared.validation(4) is not None
    with pytest.raises(ConfigError, match="validation.share = 0.5: it leaves 0 tokens of 0 documents"):
        shared.train(4)
    alone = open_corpus(str(path), validation=0.5)
    assert alone.cache.folder == shared.cache.folder  # whoever changes one source to a mixture tokenises nothing again
    assert (text_of(alone, "train"), text_of(alone, "validation")) == (text, b"")
    assert len(alone.train(4)) == 2


def test_a_zero_byte_does_not_end_a_document(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one\\u0000two"}\n')
    assert text_of(open_corpus(str(path)), "train") == b"one two\0"


@pytest.mark.parametrize("workers", [1, 2])
def test_text_that_a_tokenizer_cannot_encode(tmp_path: Path, workers: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"good": 0, "words": 1}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<eos>"])
    made.save(str(tmp_path / "t.json"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "1.txt").write_text("good words")
    (folder / "2.txt").write_text("bad words")
    with pytest.raises(ConfigError, match=r"data.tokenizer: .*t.json cannot encode .*UNK.*; legal.*2.txt\)$"):
        open_corpus(str(folder), tokenizer=str(tmp_path / "t.json"), workers=workers)
    (folder / "2.txt").unlink()
    assert open_corpus(str(folder), tokenizer=str(tmp_path / "t.json"), workers=workers).cache.train.tokens == 3
