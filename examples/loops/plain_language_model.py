"""A word language model: an LSTM whose state goes on from batch to batch, detached; the batch is the second dim."""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(words, width), nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, words)
        self.width, self.layers = width, layers

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        decoded = self.decoder(output).view(-1, self.decoder.out_features)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch_size):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(self.layers, batch_size, self.width) for _ in range(2))


def batchify(data, batch_size):
    """Return the text as ``batch_size`` columns."""
    length = data.size(0) // batch_size
    return data[: length * batch_size].view(batch_size, -1).t().contiguous()


def get_batch(source, i, bptt):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def repackage_hidden(hidden):
    """Take the state out of its history."""
    if isinstance(hidden, torch.Tensor):
        return hidden.detach()
    return tuple(repackage_hidden(one) for one in hidden)


def evaluate(model, source, criterion, bptt):
    model.eval()
    total = 0.0
    hidden = model.init_hidden(source.size(1))
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i, bptt)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def main(log=print):
    torch.manual_seed(0)
    text = torch.arange(6).repeat(60) + torch.randint(0, 3, (360,))
    train_data, valid_data, bptt = batchify(text[:280], 4), batchify(text[280:], 4), 9
    model = RNNModel(words=9, width=8, layers=2)
    criterion = nn.NLLLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        model.train()
        total_loss = 0.0
        hidden = model.init_hidden(train_data.size(1))
        for i in range(0, train_data.size(0) - 1, bptt):
            data, targets = get_batch(train_data, i, bptt)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            total_loss += loss.item()
            log(loss.item())
        log(total_loss)
        log(evaluate(model, valid_data, criterion, bptt))


if __name__ == "__main__":
    main()
