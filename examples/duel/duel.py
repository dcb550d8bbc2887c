"""A generative adversarial network of digits, whose two optimizers are stepped by hand."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Pairs of noise and an image with values from -1 to 1."""

    def __init__(self):
        pixels, _ = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 8 - 1, dtype=torch.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return torch.randn(16), self.images[index]


def digits():
    return Digits(), None


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


class LitPair(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = Pair()

    def training_step(self, batch, batch_idx):
        noise, real = batch
        critic, generator = self.optimizers()
        made = self.model.generator(noise)
        loss = softplus(self.model.critic(made.detach())).mean() + softplus(-self.model.critic(real)).mean()
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        self.log("loss_critic", loss)
        self.toggle_optimizer(generator)
        loss = softplus(-self.model.critic(made)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log("loss_generator", loss)

    def configure_optimizers(self):
        critic = torch.optim.Adam(self.model.critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
        return critic, torch.optim.Adam(self.model.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))


if __name__ == "__main__":
    lightning.seed_everything(17)
    module = LitPair()
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False).fit(module, loader)
