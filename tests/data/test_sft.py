"""Prompts with answers: reading them, their tokens and what is learnt of them, packing, and the loader over them."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.data.bpe import train_tokenizer
from shardwise.data.chat import JinjaTemplate, PlainTemplate, open_template
from shardwise.data.loader import Loader, one_pass
from shardwise.data.packing import pack
from shardwise.data.sft import Conversations, open_conversations
from shardwise.data.tokenizer import BytesTokenizer, open_tokenizer
from shardwise.data.windows import IGNORED

ONE = Mesh.of(dp=1)
ASKS = {"role": "user", "content": "Capital of Peru?"}
SAYS = {"role": "assistant", "content": "Lima"}
TWICE = [ASKS, SAYS, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes, Lima"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (  # what was thought in earlier answers is left out, as some templates do
    "{% for m in messages %}{% set c = m['content'] if loop.last else m['content'].split(', ')[-1] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with the tokens of ChatML, and a few words."""
    from tokenizers import AddedToken, Tokenizer

    made = tmp_path_factory.mktemp("tokenizer")
    (made / "text.txt").write_text("Capital of Peru? Lima. Sure? Yes, Lima. system user assistant\n" * 20)
    train_tokenizer([str(made / "text.txt")], made / "tokenizer.json", 280)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def with_template(folder: Path, to: Path, template: str) -> str:
    to.mkdir()
    (to / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (to / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(to / "tokenizer.json")


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def learnt(found: Any, ids: list[int], answers: list[bool]) -> str:
    return str(found.decode([token for token, answer in zip(ids, answers, strict=True) if answer]))


def test_the_plain_template() -> None:
    template = PlainTemplate(BytesTokenizer())
    ((ids, answers),) = template.examples([{"role": "system", "content": "Be brief."}, *TWICE])
    text = bytes(ids)
    assert text == (
        b"System: Be brief.\n\nUser: Capital of Peru?\n\nAssistant: Lima\0\n\nUser: Sure?\n\nAssistant: Yes, Lima\0"
    )
    assert learnt(BytesTokenizer(), ids, answers) == " Lima\0 Yes, Lima\0"
    assert bytes(template.prompt(TWICE[:1])) == b"User: Capital of Peru?\n\nAssistant:"
    ((plain, _),) = template.examples(TWICE)
    assert plain[: len(template.prompt(TWICE[:3]))] == template.prompt(TWICE[:3])
    with pytest.raises(ValueError, match='role "tool"; legal without a chat template: system, user, assistant'):
        template.examples([{"role": "tool", "content": "x"}, SAYS])


def test_the_template_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Against transformers' own tokens, and what it says is the assistant's."""
    from transformers import PreTrainedTokenizerFast

    name = with_template(folder, tmp_path / "chat", CHATML)
    tokenizer = open_tokenizer(name)
    assert tokenizer.end_token == "<|im_end|>"
    template = open_template(name, tokenizer)
    assert isinstance(template, JinjaTemplate)
    ((ids, answers),) = template.examples(TWICE)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "chat")
    assert ids == theirs.apply_chat_template(TWICE, return_dict=True)["input_ids"]
    assert learnt(tokenizer, ids, answers) == "Lima<|im_end|>Yes, Lima<|im_end|>"
    marked = CHATML.replace(
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
        "{% endif %}{{ '\n' }}",
    )
    known = theirs.apply_chat_template(TWICE, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)
    assert known["input_ids"] == ids and [bool(one) for one in known["assistant_masks"]] == answers
    asked = theirs.apply_chat_template(TWICE[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert template.prompt(TWICE[:1]) == asked and ids[: len(asked)] == asked


def test_a_template_that_rewrites_earlier_answers_gives_an_example_for_each(folder: Path, tmp_path: Path) -> None:
    messages = [ASKS, {"role": "assistant", "content": "hm, Lima"}, *TWICE[2:]]
    name = with_template(folder, tmp_path / "chat", FORGETFUL)
    tokenizer = open_tokenizer(name)
    first, second = open_template(name, tokenizer).examples(messages)
    assert learnt(tokenizer, *first) == "hm, Lima<|im_end|>"
    assert learnt(tokenizer, *second) == "Yes, Lima<|im_end|>"
    assert "hm" in tokenizer.decode(first.ids) and "hm" not in tokenizer.decode(second.ids)


def test_templates_that_refuse_or_do_not_ask_for_what_follows(folder: Path, tmp_path: Path) -> None:
    refusing = with_template(folder, tmp_path / "one", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="its chat template refuses it: roles must alternate"):
        open_template(refusing, open_tokenizer(refusing)).examples(TWICE)
    other = with_template(folder, tmp_path / "two", CHATML.replace("'<|im_start|>assistant\n'", "'go'"))
    with pytest.raises(ValueError, match="writes an answer otherwise than after what asks for it"):
        open_template(other, open_tokenizer(other)).examples(TWICE)
    source = write(tmp_path / "rows.jsonl", {"messages": TWICE})
    with pytest.raises(ConfigError, match=r"data\.sft: .*rows\.jsonl:1: its chat template refuses it: roles must"):
        open_conversations(source, tokenizer=refusing, cache_dir=str(tmp_path / "cache"))


def test_packing_is_whole_tight_and_repeatable() -> None:
    draw = random.Random(3)
    for size in (1, 7, 64, 500):
        lengths = [draw.randint(1, size) for _ in range(300)]
        order, starts = pack(lengths, size)
        assert sorted(order.tolist()) == list(range(300)) and starts[0] == 0 and starts[-1] == 300
        filled = [sum(lengths[i] for i in order[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
        assert max(filled) <= size and min(filled) >= 1
        assert len(filled) <= 11 / 9 * -(-sum(lengths) // size) + 1 + 300 * (size == 1)
        again = pack(np.array(lengths), size)
        assert (again[0] == order).all() and (again[1] == starts).all()
    order, starts = pack([], 5)
    assert len(order) == 0 and starts.tolist() == [0]


def conversations(tmp_path: Path, rows: int = 40, **options: Any) -> Conversations:
    pairs = [{"prompt": f"{n}?", "response": "ab" * (1 + n % 7)} for n in range(rows)]
    source = write(tmp_path / "pairs.jsonl", *pairs)
    return open_conversations(source, tokenizer="bytes", cache_dir=str(tmp_path / "cache"), **options)


@pytest.mark.parametrize("shifted", [True, False])
def test_rows_have_whole_examples_and_targets_in_answers_alone(tmp_path: Path, shifted: bool) -> None:
    found = conversations(tmp_path)
    rows = found.train(96, shifted=shifted, fields="documents")
    texts = []
    for row in range(len(rows)):
        one = rows[row]
        ids, labels, documents = one["input_ids"], one["labels"], one["documents"]
        targets = torch.full_like(ids, IGNORED)
        if shifted:
            targets[1:] = labels[:-1]
            assert labels[-1] == IGNORED
        else:
            targets = labels
        kept = targets != IGNORED
        assert torch.equal(targets[kept], ids[kept])
        for document in range(int(documents.max()) + 1):
            here = documents == document
            text, answer = bytes(ids[here].tolist()), bytes(ids[here & kept].tolist())
            if text.strip(b"\0"):
                assert text.startswith(b"User: ") and text.endswith(b"Assistant:" + answer) and answer[-1] == 0
                texts.append(text)
            else:
                assert not answer and document == int(documents.max()), "what is left of a row"
    assert len(texts) == len(set(texts)) == 40


def test_the_mask_of_a_row_keeps_examples_apart(tmp_path: Path) -> None:
    row = conversations(tmp_path).train(96, shifted=False, fields="mask")[0]
    documents = conversations(tmp_path).train(96, shifted=False, fields="documents")[0]["documents"]
    mask, places = row["attention_mask"][0], row["position_ids"]
    for query in range(96):
        seen = [key for key in range(96) if mask[query, key]]
        assert seen == [key for key in range(query + 1) if documents[key] == documents[query]]
        assert places[query] == len(seen) - 1
    assert set(conversations(tmp_path).train(96, shifted=True, fields="none")[0]) == {"input_ids", "labels"}


def test_long_examples_are_cut_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "response": "b" * 50},
        {"prompt": "a" * 50, "response": "b"},
        {"prompt": "c", "response": "d"},
    ]
    source = write(tmp_path / "long.jsonl", *rows)
    found = open_conversations(source, tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    train = found.train(32, shifted=True, fields="none")
    assert (len(train), train.cut, train.left_out) == (2, 1, 1)
    with pytest.raises(ConfigError, match=r"data\.sequence_length = 4: no answer of .* begins within the first 4 tok"):
        found.train(4, shifted=True, fields="none")


def test_validation_is_chosen_by_content(tmp_path: Path) -> None:
    found = conversations(tmp_path, 400, validation=0.25)
    train, apart = (len(side) for side in found.sides)
    assert train + apart == 400 and 60 < apart < 140
    held = found.validation(96, shifted=True, fields="documents")
    assert held is not None and held.digest != found.train(96, shifted=True, fields="documents").digest
    batches = list(one_pass(held, ONE, 0, 4))
    assert sum(len(batch.fields["labels"]) for batch in batches) == len(held)
    assert conversations(tmp_path, 4).validation(96, shifted=True, fields="none") is None
    all_apart = conversations(tmp_path, 1, validation=0.999999)
    with pytest.raises(
        ConfigError, match=r"validation\.share = 0.999999: all 1 examples of .* legal: a smaller fraction"
    ):
        all_apart.train(96, shifted=True, fields="none")


def test_the_loader_goes_on_at_the_exact_next_row(tmp_path: Path) -> None:
    rows = conversations(tmp_path, 200).train(64, shifted=True, fields="documents")
    with Loader(rows, ONE, 0, 3, seed=5) as loader:
        whole = [batch.fields for batch in islice(loader, 2 * len(rows) // 3)]
    with Loader(rows, ONE, 0, 3, seed=5) as loader:
        for _ in islice(loader, 7):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(conversations(tmp_path, 200).train(64, shifted=True, fields="documents"), ONE, 0, 3, seed=5) as again:
        again.load_state_dict(state)
        for before, batch in zip(whole[7:], again, strict=False):
            assert all(torch.equal(before[name], batch.fields[name]) for name in before)
    other = conversations(tmp_path, 201).train(64, shifted=True, fields="documents")
    with Loader(other, ONE, 0, 3, seed=5) as loader, pytest.raises(ConfigError, match="the data is not the data"):
        loader.load_state_dict(state)


def test_tokens_are_made_once(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = conversations(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == 40 and calls[-1][0] == calls[-1][1]
    calls.clear()
    again = conversations(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert not calls and again.digest == first.digest
    assert conversations(tmp_path, 41).digest != first.digest
    assert conversations(tmp_path, validation=0.5).digest != first.digest


def test_several_files_and_the_prompt_of_a_sample(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    write(tmp_path / "some" / "a.jsonl", {"prompt": "one", "completion": "two"})
    write(tmp_path / "some" / "b.jsonl", {"messages": TWICE})
    for sources in (str(tmp_path / "some"), str(tmp_path / "some" / "*.jsonl"), [str(tmp_path / "some")] * 2):
        found = open_conversations(sources, tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
        assert len(found.sides[0]) == 2
        assert bytes(found.prompt) == b"User: one\n\nAssistant:"


WRONG = [
    ("{", r"not JSON: Expecting property name .* at column 2; legal: one JSON object a line"),
    ("[]", "list; legal: one JSON object a line"),
    ('{"prompt": "x"}', "it has prompt; legal: .*response"),
    ('{"text": "x"}', "it has text; legal"),
    ('{"prompt": 1, "response": "x"}', "the content of message 1 is of type int"),
    ('{"prompt": "x", "response": ""}', "no message of the assistant, so there is nothing to learn"),
    ('{"messages": "x"}', "messages is of type str"),
    ('{"messages": []}', "no message of the assistant"),
    ('{"messages": [{"content": "x"}]}', "message 1 has no role"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', "the content of message 1 is of type list"),
    ('{"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}', 'role "tool"; legal'),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_lines_that_are_no_examples(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x", "response": "y"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"data\.sft: .*rows\.jsonl:3: {words}"):
        open_conversations(str(path), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))


def test_sources_that_are_no_files_of_examples(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text("\n")
    for source in (tmp_path / "text.txt", tmp_path / "empty", tmp_path / "*.parquet"):
        with pytest.raises(ConfigError, match=r"data\.sft: .* no \.jsonl file; legal: a \.jsonl file"):
            open_conversations(str(source), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    found = open_conversations(str(tmp_path / "none.jsonl"), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"data\.sft: .*none\.jsonl is empty; legal: one example or more"):
        found.train(8, shifted=True, fields="none")


@pytest.mark.parametrize("library", [True, False])
def test_a_batch_of_packed_rows_is_its_examples_one_by_one(tmp_path: Path, library: bool) -> None:
    """In fp64: the mean over all answers' tokens, each example computed alone, and all gradients."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.models import Llama
    from shardwise.verify.promote import Promote64

    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = {"vocabulary": 256, "width": 16, "layers": 2, "heads": 2, "context": 96}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)) if library else Llama(**own)
    model.double()
    if not library:  # the table is rounded to fp32, and so are the differences of positions that it stands for
        frequencies = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.double) / 8)
        angles = torch.outer(torch.arange(96, dtype=torch.double), frequencies).repeat(1, 2)
        model.rotary = torch.stack((angles.cos(), angles.sin()))
    found = conversations(tmp_path, 12)
    fields = "mask" if library else "documents"
    rows = found.train(96, shifted=not library, fields=fields)
    assert len(rows) < 12
    packed = rows.read_rows(range(len(rows)))
    with Promote64():
        loss = model(**packed).loss if library else model(**packed)
        loss.backward()
    packed_gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    (examples, _), total, count = found.sides, torch.zeros((), dtype=torch.float64), 0
    with Promote64():
        for a, b in zip(examples.starts, examples.starts[1:], strict=False):
            ids, answers = torch.from_numpy(examples.ids[a:b].astype(np.int64)), torch.from_numpy(examples.answers[a:b])
            output = model(input_ids=ids[None])
            logits = (output.logits if library else output)[0, :-1][answers[1:]]
            total = total + torch.nn.functional.cross_entropy(logits, ids[1:][answers[1:]], reduction="sum")
            count += int(answers[1:].sum())
        (total / count).backward()
    assert abs(float(loss) - float(total) / count) <= 1e-10 * float(total) / count
    for name, one in model.named_parameters():
        assert (packed_gradients[name] - one.grad).norm() <= 1e-10 * one.grad.norm(), name
