"""Digits, moved by up to a pixel whenever they are read."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Moved(Dataset):
    def __init__(self, images, targets):
        self.images, self.targets = images, targets

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll((down, right), dims=(1, 2)), self.targets[index]


def digits():
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(targets)
    return Moved(images[:1438], targets[:1438]), list(zip(images[1438:], targets[1438:]))


class Classifier(lightning.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        )

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(outputs, batch[1]))
        self.log("val_accuracy", (outputs.argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)]


if __name__ == "__main__":
    lightning.seed_everything(17)
    module = Classifier()
    train, validation = digits()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, logger=False)
    trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), DataLoader(validation, batch_size=64))
