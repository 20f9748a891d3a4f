"""Write stand-ins for what you have: base/, a folder as Hugging Face models come in, but tiny, and text/.

With a model of your own, leave this script out: set model.pretrained and data.source in train.toml.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
VOCABULARY = 2048


def main() -> None:
    base, text = HERE / "base", HERE / "text"
    text.mkdir(exist_ok=True)
    for name, words in topics.items():  # Python's own documentation
        (text / f"{name}.txt").write_text(words, encoding="utf-8")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    tokenizer.save(str(base / "tokenizer.json"))
    print(f"wrote {base} and {text}")


if __name__ == "__main__":
    main()
