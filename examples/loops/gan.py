"""DCGAN: a discriminator on real and on made pictures, and a generator that learns through it."""

import torch
from torch import nn

from shardwise import distribute


class Generator(nn.Module):
    def __init__(self, nz=5, ngf=4):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, 2 * ngf, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, ndf=4):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 2 * ndf, 3, 1, 1, bias=False),
            nn.BatchNorm2d(2 * ndf),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).view(-1)


def main(log=print):
    torch.manual_seed(0)
    real_label, fake_label, nz = 1.0, 0.0, 5
    pictures = torch.tanh(torch.randn(18, 1, 8, 8) + 1)
    netG, netD = Generator(), Discriminator()
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(4, nz, 1, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    (netD, optimizerD), (netG, optimizerG) = distribute(netD, optimizerD), distribute(netG, optimizerG)
    for _ in range(2):
        for real in pictures.split(6):
            # The discriminator: maximise log D(x) + log(1 - D(G(z))).
            netD.zero_grad()
            label = torch.full((real.size(0),), real_label)
            output = netD(real)
            errD_real = criterion(output, label)
            errD_real.backward()
            D_x = output.mean().item()
            fake = netG(torch.randn(real.size(0), nz, 1, 1))
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            D_G_z1 = output.mean().item()
            errD = errD_real + errD_fake
            optimizerD.step()
            # The generator: maximise log D(G(z)).
            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            D_G_z2 = output.mean().item()
            optimizerG.step()
            for one in (errD.item(), errG.item(), D_x, D_G_z1, D_G_z2):
                log(one)
        netG.eval()
        with torch.no_grad():
            log(netG(fixed_noise).detach().cpu().abs().mean().item())
        netG.train()


if __name__ == "__main__":
    main()
