"""Digits: a convolutional net, negative log-likelihood, a schedule over the optimizer, accuracy on a test set."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from shardwise import distribute


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(number):
    """Noisy pictures: each digit is a pattern of its own."""
    patterns = torch.randn(10, 1, 12, 12)
    target = torch.randint(0, 10, (number,))
    return TensorDataset(patterns[target] + 0.5 * torch.randn(number, 1, 12, 12), target)


def train(model, device, loader, optimizer, log):
    model.train()
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        log(loss.item())


def test(model, device, loader, log):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    log(test_loss / len(loader.dataset))
    log(correct / len(loader.dataset))


def main(log=print):
    torch.manual_seed(0)
    device = torch.device("cpu")
    everything = digits(90)
    train_set, test_set = torch.utils.data.random_split(everything, [60, 30])
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=20)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = distribute(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        train(model, device, train_loader, optimizer, log)
        test(model, device, test_loader, log)
        scheduler.step()


if __name__ == "__main__":
    main()
