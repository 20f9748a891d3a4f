"""A part-of-speech tagger: an LSTM over padded sentences, whose padding does not count; the tags it finds."""

import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class LSTMTagger(nn.Module):
    def __init__(self, words, tags, width=6, hidden=8):
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * hidden, tags)

    def forward(self, sentences):
        lstm_out, _ = self.lstm(self.word_embeddings(sentences))
        return F.log_softmax(self.hidden2tag(lstm_out), dim=-1)


def sentences(number, words, length):
    """Return sentences of different lengths, and their tags."""
    tokens = torch.randint(1, words, (number, length))
    for i in range(number):
        tokens[i, 2 + i % (length - 2) :] = PAD
    return tokens, torch.where(tokens == PAD, -100, tokens % 4)


def main(log=print):
    torch.manual_seed(0)
    words, length = 20, 7
    tokens, tags = sentences(22, words, length)
    model = LSTMTagger(words, 4)
    loss_function = nn.NLLLoss(ignore_index=-100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        right, seen = 0, 0
        for sentence_in, targets in zip(tokens.split(8), tags.split(8)):
            model.zero_grad()
            tag_scores = model(sentence_in)
            loss = loss_function(tag_scores.view(-1, tag_scores.size(-1)), targets.view(-1))
            loss.backward()
            optimizer.step()
            mask = targets != -100
            right += (tag_scores.argmax(-1)[mask] == targets[mask]).sum().item()
            seen += mask.sum().item()
            log(loss.item())
        log(right / seen)


if __name__ == "__main__":
    main()
