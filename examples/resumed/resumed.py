"""A training that continues where an earlier one ended: python resumed.py 2, then python resumed.py 4."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from net import Net, digits
from torch import nn
from torch.utils.data import DataLoader

if __name__ == "__main__":
    epochs, folder = int(sys.argv[1]), Path("state")
    set_seed(17)
    model = Net(hidden=64)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if folder.exists():
        accelerator.load_state(folder)
        first = int((folder / "epoch").read_text())
    for epoch in range(first, epochs):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(folder)
        (folder / "epoch").write_text(str(epoch + 1))
