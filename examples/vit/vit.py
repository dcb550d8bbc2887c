"""A vision transformer of digits: the patches of an image are the tokens of an encoder, whose mean is classified."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def digits():
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    both = TensorDataset(images, torch.tensor(classes))
    return TensorDataset(*both[:1440]), TensorDataset(*both[1440:])


class ViT(nn.Module):
    def __init__(self, width=32, depth=1):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.classifier = nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.classifier(self.blocks(tokens).mean(dim=1))


if __name__ == "__main__":
    torch.manual_seed(17)
    model = ViT()
    train, validation = digits()
    loader = DataLoader(train, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for images, targets in loader:
            loss = cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, float(loss))
    with torch.no_grad():
        images, targets = validation.tensors
        print((model(images).argmax(1) == targets).float().mean())
