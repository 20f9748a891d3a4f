"""Segmentation: a U-Net, binary cross-entropy plus dice, clipped gradients, a dice score on held-out pictures."""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import distribute


def double(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.down1, self.down2 = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up1, self.wide1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), double(4 * width, 2 * width)
        self.up2, self.wide2 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), double(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.first(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        b = self.wide1(torch.cat([b, self.up1(c)], dim=1))
        return self.last(self.wide2(torch.cat([a, self.up2(b)], dim=1)))


def dice_coeff(predicted, target, epsilon=1e-6):
    """Return the mean over pictures of twice the overlap by the sum of both."""
    inter = 2 * (predicted * target).sum(dim=(-1, -2))
    sets = predicted.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets = torch.where(sets == 0, inter, sets)
    return ((inter + epsilon) / (sets + epsilon)).mean()


def dice_loss(predicted, target):
    return 1 - dice_coeff(predicted, target)


def pictures(number, size=8):
    """Bright squares on noise, and where they are."""
    images, masks = 0.3 * torch.randn(number, 1, size, size), torch.zeros(number, size, size)
    for i in range(number):
        x, y = torch.randint(0, size - 3, (2,)).tolist()
        masks[i, x : x + 3, y : y + 3] = 1
    return images + masks.unsqueeze(1), masks


def main(log=print):
    torch.manual_seed(0)
    images, masks = pictures(24)
    valid_images, valid_masks = pictures(6)
    model = UNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    model, optimizer = distribute(model, optimizer)
    for _ in range(2):
        model.train()
        epoch_loss = 0
        for x, true_masks in zip(images.split(8), masks.split(8)):
            masks_pred = model(x)
            loss = criterion(masks_pred.squeeze(1), true_masks)
            loss += dice_loss(torch.sigmoid(masks_pred.squeeze(1)), true_masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            epoch_loss += loss.item()
            log(loss.item())
        log(epoch_loss)
        model.eval()
        with torch.no_grad():
            predicted = (torch.sigmoid(model(valid_images)).squeeze(1) > 0.5).double()
            log(dice_coeff(predicted, valid_masks).item())


if __name__ == "__main__":
    main()
