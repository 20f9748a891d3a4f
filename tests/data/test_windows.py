"""Windows of tokens: they tile the text, and keep documents apart if asked to."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ConfigError
from shardwise.data import windows
from shardwise.data.corpus import open_corpus
from shardwise.data.windows import IGNORED, DocumentFields, PackedWindows


def test_windows_tile_the_text() -> None:
    tokens = np.arange(100, dtype=np.uint8)
    found = PackedWindows(tokens, 7)
    assert len(found) == 14
    for index in range(len(found)):
        sample = found[index]
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
        assert sample["input_ids"].tolist() == list(range(7 * index, 7 * index + 7))
        assert sample["labels"].tolist() == list(range(7 * index + 1, 7 * index + 8))
    for bad in (14, -1):
        with pytest.raises(IndexError):
            found[bad]
    assert len(PackedWindows(tokens[:8], 7)) == 1
    assert len(PackedWindows(tokens[:15], 7)) == 2
    with pytest.raises(ConfigError, match="7 tokens, too few"):
        PackedWindows(tokens[:7], 7)


def test_labels_left_for_the_model_to_shift() -> None:
    sample = PackedWindows(np.arange(20, dtype=np.uint16), 4, shifted=False)[1]
    assert sample["labels"].tolist() == sample["input_ids"].tolist() == [4, 5, 6, 7]
    assert sample["labels"].data_ptr() != sample["input_ids"].data_ptr()


@pytest.mark.parametrize("fields", ["none", "documents", "mask"])
def test_rows_are_samples_stacked(fields: DocumentFields) -> None:
    tokens = np.random.default_rng(0).integers(0, 5, 300).astype(np.uint32)
    found = PackedWindows(tokens, 11, fields=fields)
    indices = np.array([3, 0, 26, 3])
    rows = found.read_rows(indices)
    for name, value in rows.items():
        assert torch.equal(value, torch.stack([found[int(index)][name] for index in indices]))
        assert value.is_contiguous()
    empty = found.read_rows([])
    assert {name: (tuple(value.shape[1:]), value.dtype) for name, value in empty.items()} == {
        name: (tuple(value.shape[1:]), value.dtype) for name, value in rows.items()
    }
    assert all(value.shape[0] == 0 for value in empty.values())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=14, max_size=40), st.booleans())
def test_documents_of_a_window(tokens: list[int], shifted: bool) -> None:
    """Against a walk over the tokens, one by one."""
    made = [
        PackedWindows(np.array(tokens, np.uint8), 13, shifted=shifted, end=2, fields=f) for f in ("documents", "mask")
    ]
    for index in range(len(made[0])):
        ids = tokens[13 * index : 13 * index + 14]
        documents, positions, labels = [], [], []
        for place in range(13):
            fresh = place > 0 and ids[place - 1] == 2
            documents.append(documents[-1] + fresh if documents else 0)
            positions.append(0 if fresh or not positions else positions[-1] + 1)
            if shifted:
                labels.append(IGNORED if ids[place] == 2 else ids[place + 1])
            else:
                labels.append(IGNORED if fresh else ids[place])
        ours, masked = made[0][index], made[1][index]
        assert ours["documents"].tolist() == documents
        assert ours["labels"].tolist() == masked["labels"].tolist() == labels
        assert ours["input_ids"].tolist() == masked["input_ids"].tolist() == ids[:13]
        assert masked["position_ids"].tolist() == positions
        mask = [[documents[q] == documents[k] and k <= q for k in range(13)] for q in range(13)]
        assert masked["attention_mask"].tolist() == [mask]
    assert made[0].digest != made[1].digest


def test_reading_gives_pages_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_bytes(bytes(range(1, 251)) * 4000)
    found = open_corpus(str(tmp_path / "t.txt"), cache_dir=str(tmp_path / "c")).train(100)
    given: list[int] = []
    monkeypatch.setattr(found, "_mapped", type("Mapping", (), {"madvise": lambda self, advice: given.append(advice)})())
    order = np.random.default_rng(0).permutation(len(found))
    before = [found[int(index)]["input_ids"].tolist() for index in order[:5]]
    for start in range(0, len(order), 64):
        found.read_rows(order[start : start + 64])
    assert len(given) == len(order) // windows.RELEASE_ROWS
    assert before == [found[int(index)]["input_ids"].tolist() for index in order[:5]]


def test_tokens_survive_giving_pages_back(tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(1, 255, 2_000_000).astype(np.uint8).tobytes()
    (tmp_path / "t.txt").write_bytes(content)
    found = open_corpus(str(tmp_path / "t.txt"), cache_dir=str(tmp_path / "c")).train(100)
    for start in range(0, len(found), 500):
        rows = found.read_rows(np.arange(start, min(start + 500, len(found))))
        for row, ids in enumerate(rows["input_ids"].numpy().astype(np.uint8)):
            assert ids.tobytes() == content[(start + row) * 100 : (start + row + 1) * 100]
