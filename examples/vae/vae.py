"""A variational autoencoder of digits, with both terms of its loss logged."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits():
    pixels, _ = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32))
    return TensorDataset(*images[:1408]), TensorDataset(*images[1408:])


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, images):
        mean, logvar = self.encoder(images).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (logvar / 2).exp()
        return self.decoder(code), mean, logvar


class LitVAE(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = VAE()

    def training_step(self, batch, batch_idx):
        decoded, mean, logvar = self.model(batch[0])
        rebuilt = nn.functional.mse_loss(decoded, batch[0], reduction="none").sum(1).mean()
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        self.log_dict({"rebuilt": rebuilt, "kl": kl})
        return rebuilt + kl

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    lightning.seed_everything(17)
    module = LitVAE()
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    lightning.Trainer(accelerator="cpu", max_epochs=3, logger=False).fit(module, loader)
