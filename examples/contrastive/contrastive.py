"""Features of digits without labels: two noisy views of an image attract each other and repel those of all others."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    """Pairs of two views of an image: moved by up to a pixel, with noise."""

    def __init__(self):
        pixels, _ = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 8, 8)[:1280]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.view(index), self.view(index)

    def view(self, index):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll((down, right), (0, 1)).flatten() + 0.1 * torch.randn(64)


def digits():
    return Views(), None


def encoder():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def contrast(views):
    """NT-Xent, the loss of SimCLR, for views of (images, 2, features)."""
    rows = normalize(torch.cat(views.unbind(1)), dim=1)
    similarity = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
    return cross_entropy(similarity, torch.arange(len(rows)).roll(len(views)))


if __name__ == "__main__":
    torch.manual_seed(17)
    model = encoder()
    loader = DataLoader(digits()[0], batch_size=128, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(6):
        for first, second in loader:
            both = model(torch.cat([first, second]))
            loss = contrast(torch.stack(both.chunk(2), dim=1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, float(loss))
