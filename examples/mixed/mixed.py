"""Mixed precision, clipped gradients, and a learning rate that warms up and follows a cosine."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from net import Net, digits
from torch import nn
from torch.utils.data import DataLoader


def warm_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


if __name__ == "__main__":
    set_seed(17)
    model = Net(hidden=64)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = warm_cosine(optimizer, warmup=10, total=3 * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(3):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(epoch, float(loss))
