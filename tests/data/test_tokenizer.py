"""Tokenizers: there and back, ends of documents, and files that are none."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.core.errors import ConfigError
from shardwise.data import tokenizer
from shardwise.data.bpe import train_tokenizer
from shardwise.data.tokenizer import BytesTokenizer, JsonTokenizer, open_tokenizer, token_dtype


def test_bytes() -> None:
    bytes_ = open_tokenizer("bytes")
    assert (bytes_.vocabulary, bytes_.end, bytes_.end_token) == (256, 0, None)
    text = "naïve 東京\n"
    (ids,) = bytes_.encode([text.encode()])
    assert ids.dtype == np.uint8
    assert bytes_.decode(ids) == text
    assert bytes_.decode([104, 105, 300, -1, 0xC3]) == "hi\ufffd\ufffd\ufffd"
    assert isinstance(bytes_, BytesTokenizer)
    assert bytes_.encode([b"a\0b\0"])[0].tobytes() == b"a b "  # text cannot end a document


def test_json_there_and_back(tokenizer_json: str) -> None:
    made = JsonTokenizer(tokenizer_json)
    assert (made.vocabulary, made.end_token, made.end) == (400, "<|endoftext|>", 0)
    whole = ["def test() -> None:\n    pass\n", "naïve 東京 🙂", "", " "]
    ids = made.encode([text.encode() for text in whole])
    assert [made.decode(each) for each in ids] == whole
    assert all(each.dtype == np.uint16 for each in ids)
    assert len(ids[0]) < len(whole[0])
    assert made.decode(made.encode([b"a\xffb"])[0]) == "a\ufffdb"
    assert made.decode([10**6, -5, *ids[0].tolist()]) == whole[0]


def test_text_cannot_end_a_document(tokenizer_json: str) -> None:
    made = JsonTokenizer(tokenizer_json)
    text = "what <|endoftext|> means"
    (ids,) = made.encode([text.encode()])
    assert made.end not in ids
    assert made.decode(ids) == text


def test_an_end_token_that_is_not_special(tokenizer_json: str, tmp_path: Path) -> None:
    """Text would become the token: it is made special, or refused where the tokenizer's model makes it of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    values = json.loads(Path(tokenizer_json).read_text())
    (added,) = values["added_tokens"]
    added["special"] = False
    (tmp_path / "added.json").write_text(json.dumps(values))
    made = JsonTokenizer(str(tmp_path / "added.json"))
    text = "what <|endoftext|> means"
    (ids,) = made.encode([text.encode()])
    assert made.end == 0 and made.end not in ids
    assert made.decode(ids) == text
    assert made.decode([made.end]) == "<|endoftext|>"
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match=r'data.end_token = "</s>": text .* of .*words.json.*; legal'):
        JsonTokenizer(str(tmp_path / "words.json"))
    words.add_special_tokens(["<eos>"])  # what the error advises
    words.save(str(tmp_path / "words.json"))
    made = JsonTokenizer(str(tmp_path / "words.json"), "<eos>")
    assert made.encode([b"a <eos> </s>"])[0].tolist() == [1, 2, 0]


def test_truncation_and_padding_of_the_file_are_left_aside(tokenizer_json: str, tmp_path: Path) -> None:
    values = json.loads(Path(tokenizer_json).read_text())
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(values))
    plain, other = JsonTokenizer(tokenizer_json), JsonTokenizer(str(tmp_path / "t.json"))
    text = b"import pytest\n" * 5
    assert np.array_equal(plain.encode([text])[0], other.encode([text])[0])
    assert plain.digest != other.digest


@pytest.mark.parametrize("text", ["words and lines\n" * 300, "nolines " * 600, "東京" * 900, "x" * 5000])
def test_long_text_is_encoded_in_parts(tokenizer_json: str, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(tokenizer, "LONG", 1000)
    parts = list(tokenizer._parts(text.encode()))
    assert b"".join(parts).decode() == text
    assert len(parts) > 2 and max(map(len, parts)) <= 1000
    for part in parts:
        part.decode()
    made = JsonTokenizer(tokenizer_json)
    assert made.decode(made.encode([text.encode()])[0]) == text


def test_end_tokens(tokenizer_json: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='data.end_token = "a": text'):
        JsonTokenizer(tokenizer_json, "a")
    with pytest.raises(ConfigError, match=r'data.end_token = "<\|endoftxt\|>".*Did you mean "<\|endoftext\|>"'):
        JsonTokenizer(tokenizer_json, "<|endoftxt|>")
    path = tmp_path / "t.json"
    path.write_text(Path(tokenizer_json).read_text().replace("<|endoftext|>", "<other>"))
    with pytest.raises(ConfigError, match=r"none of <\|endoftext\|>, </s>, <eos>, \[SEP\]"):
        JsonTokenizer(str(path))
    path.write_text(Path(tokenizer_json).read_text().replace("<|endoftext|>", "<eos>"))
    assert JsonTokenizer(str(path)).end_token == "<eos>"


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[1]", '{"model": 3}'])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="data.tokenizer: .*t.json.*legal"):
        JsonTokenizer(str(path))
    with pytest.raises(ConfigError, match="data.tokenizer"):
        JsonTokenizer(str(tmp_path))


def test_the_dtype_is_the_smallest() -> None:
    assert [token_dtype(size).itemsize for size in (2, 256, 257, 65536, 65537)] == [1, 1, 2, 2, 4]


def test_training_is_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, the rat sat on the cat\n" * 50)
    calls: list[tuple[int, int]] = []
    one = train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "1.json", 300, progress=lambda *x: calls.append(x))
    two = train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "2.json", 300)
    assert Path(one.path).read_bytes() == Path(two.path).read_bytes()
    assert (one.documents, one.bytes) == (1, 47 * 50)
    assert one.vocabulary < 300  # so little text has no more pairs
    assert calls[-1] == (2350, 2350)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json", "text.txt"]
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "1.json", 256)
    with pytest.raises(ConfigError, match="--out .*nowhere"):
        train_tokenizer([str(tmp_path / "text.txt")], tmp_path / "nowhere" / "1.json", 300)
