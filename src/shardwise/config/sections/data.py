"""The keys of the section ``[data]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.data.sources import LEGAL as LEGAL_SOURCE
from shardwise.data.sources import LEGAL_SFT

from ..rules import (
    by_name,
    choice,
    integer,
    key,
    number,
    reference,
    table,
    tables,
    text,
    texts,
)  # fmt: skip

SOURCE = texts(LEGAL_SOURCE)
MIX = tables(
    "a list of tables such as {source = \"stdlib\", weight = 0.5}",
    {"source": SOURCE, "weight": number(0, open_=True)},
)  # fmt: skip


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: the data is text (``source`` or ``mix``), prompts with their answers (``sft``) or a dataset
    (``factory``); without any of them it is ``source = "stdlib"``, the source code of Python's library.
    """

    source: str | tuple[str, ...] | None = key(
        SOURCE,
        does="text",
        otherwise='`"stdlib"`',
        legal=(
            '`"stdlib"`, a file, a folder, a glob of .txt, .md, .py, .jsonl or .parquet files, the folder'
            " of a Hugging Face dataset, or a list of these"
        ),
    )
    mix: tuple[Mapping[str, Any], ...] | None = key(
        MIX,
        does="several sources by weight",
        otherwise="none",
        legal='a list of tables such as `{source = "stdlib", weight = 0.5}`',
    )
    sft: str | tuple[str, ...] | None = key(
        texts(LEGAL_SFT),
        does=(
            "supervised fine-tuning: prompts with the answers to learn, of which each line has one as "
            '`{"prompt": …, "response": …}` or as `{"messages": [{"role": …, "content": …}, …]}`'
        ),
        otherwise="none",
        legal="a .jsonl file, a glob or a folder of them, or a list of these",
    )
    text_field: str | None = key(
        text("the name of the column of text in .jsonl, .parquet and datasets"),
        does="the column of .jsonl, .parquet and datasets that has the text",
        otherwise='`"text"`',
        legal="the name of a column",
    )
    tokenizer: str | None = key(
        text('"bytes", or the path of a tokenizer.json (`shardwise tokenizer train` makes one)'),
        does="what turns text into tokens",
        otherwise='`"bytes"`; with `model.pretrained` that of the folder',
        legal='`"bytes"`, or the path of a `tokenizer.json`',
    )
    end_token: str | None = key(
        text("the token of data.tokenizer that ends a document"),
        does="for a `tokenizer.json`: the token that ends every document (for bytes it is byte 0)",
        otherwise=(
            "the `eos_token` of the `tokenizer_config.json` beside it, else the first that it has of "
            "<code>&lt;&#124;endoftext&#124;&gt;</code>, `</s>`, `<eos>`, `[SEP]`"
        ),
        legal="a token of `tokenizer`",
    )
    attention: str | None = key(
        choice("full", "document"),
        does="whether attention crosses document boundaries, or stays within a document (with `sft`: an example)",
        otherwise='`"full"`; with `sft` `"document"`',
    )
    cache_dir: str | None = key(
        text("the path of a folder for tokens"),
        does="the folder that keeps tokens, so that text is tokenised once",
        otherwise="`$XDG_CACHE_HOME/shardwise/tokens`, else `~/.cache/shardwise/tokens`",
    )
    factory: str | None = key(
        reference("a function that returns a map-style dataset, an IterableDataset or a DataLoader,"),
        does="a function that returns a map-style dataset, an `IterableDataset` or a `DataLoader`",
        otherwise="none",
        legal="as `model.factory`",
    )
    arguments: Mapping[str, Any] | None = key(
        table("a table of keyword arguments of the factory"),
        does="keyword arguments of the factory",
        otherwise="none",
        legal="a table",
    )
    pad: Mapping[str, float] | None = key(
        by_name("a table of a number for each field", number(-math.inf)),
        does="the fields whose rows have several lengths, with the numbers that fill them up to the longest of a batch",
        otherwise="none",
        legal="a table such as `{input_ids = 0, labels = -100}`",
    )
    pad_mask: str | None = key(
        text("the name of a field"),
        does="a field that batches get besides: 1 where a row of the first field of `pad` has a value, else 0",
        otherwise="none",
        legal='a name such as `"attention_mask"`',
    )
    pad_to_multiple_of: int | None = key(
        integer(1),
        does="what filled lengths are a multiple of, so that there are fewer shapes, each of which is traced",
        otherwise="1",
    )
    varies: Mapping[str, int] | None = key(
        by_name("a table of the largest size of each FIELD.DIM", integer(1)),
        does="the dims of fields whose sizes vary from batch to batch, with the largest, for which memory is predicted",
        otherwise="none",
        legal='a table such as `{"input_ids.1" = 512}`',
    )
    batch_size: int = key(
        integer(1),
        16,
        does="the number of rows in a step, over all ranks and microbatches; of a `DataLoader` it has to be its own",
        legal="a multiple of `parallel.dp` × `parallel.microbatches`",
    )
    sequence_length: int = key(
        integer(1),
        128,
        does="the number of tokens in a row",
    )

    @property
    def is_text(self) -> bool:
        """Whether the data is text, which is tokenised, and not a dataset of the user."""
        return self.factory is None
