"""Text classification as Hugging Face's scripts without a Trainer do it: ``model(**batch).loss``, and a schedule."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from shardwise import distribute


def sentences(number, length=7, words=30):
    """Return sentences, padded to one length, with a label each."""
    examples = []
    for i in range(number):
        size = 3 + i % (length - 2)
        ids = torch.randint(1, words, (length,))
        mask = (torch.arange(length) < size).long()
        examples.append({"input_ids": ids * mask, "attention_mask": mask, "labels": (ids * mask).sum() % 3})
    return examples


def main(log=print):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config).to(torch.get_default_dtype())
    train_dataloader = DataLoader(sentences(24), batch_size=4, shuffle=True)
    eval_dataloader = DataLoader(sentences(10), batch_size=4)
    no_decay = ["bias", "LayerNorm.weight"]
    grouped = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=5e-3)
    model, optimizer = distribute(model, optimizer)
    gradient_accumulation_steps = 2
    lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=1, num_training_steps=6)
    for _ in range(2):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach()
            loss = loss / gradient_accumulation_steps
            loss.backward()
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        log(total_loss.item() / len(train_dataloader))
        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            right += (outputs.logits.argmax(dim=-1) == batch["labels"]).sum().item()
        log(right / 10)


if __name__ == "__main__":
    main()
