"""Write stand-ins for what you have: base/, a folder as Hugging Face models come in, but tiny, and answers.jsonl.

With a model of your own, leave this script out: set model.pretrained and data.sft in train.toml.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
VOCABULARY = 512
QUESTIONS = (
    "What is the capital of {}?", "What is the capital city of {}?", "Which city is the capital of {}?",
    "Name the capital of {}.", "Tell me the capital of {}.", "Do you know the capital of {}?",
)  # fmt: skip
CAPITALS = {
    "Argentina": "Buenos Aires", "Austria": "Vienna", "Bolivia": "Sucre", "Canada": "Ottawa", "Chile": "Santiago",
    "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Finland": "Helsinki", "France": "Paris",
    "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik", "India": "New Delhi",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok",
    "Tunisia": "Tunis", "Uruguay": "Montevideo", "Vietnam": "Hanoi", "Zambia": "Lusaka",
}  # fmt: skip


def main() -> None:
    base, answers = HERE / "base", HERE / "answers.jsonl"
    lines = [
        json.dumps({"prompt": question.format(country), "response": f"The capital of {country} is {capital}."})
        for country, capital in CAPITALS.items()
        for question in QUESTIONS
    ]
    answers.write_text("\n".join(lines) + "\n", encoding="utf-8")
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
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(base / "tokenizer.json"))
    print(f"wrote {base} and {answers}")


if __name__ == "__main__":
    main()
