"""experiments/nanogpt.yaml as a loop in plain torch, on one device."""

import math
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pipeline.data import characters
from pipeline.models import GPT
from pipeline.train.order import SampleOrder, mix

SEED, STEPS, BATCH, PARTS, WARMUP = 17, 300, 32, 4, 20


def rate(step: int) -> float:
    """Return the factor on the learning rate: a linear warm-up, and a cosine over all steps."""
    return min(1.0, (step + 1) / (WARMUP + 1)) * (1 + math.cos(math.pi * step / STEPS)) / 2


def train(steps: int = STEPS, *, width: int = 64, depth: int = 2, dtype: torch.dtype = torch.float32) -> list[float]:
    """Return the loss of each step."""
    tokens, targets = characters(context_length=64).train.tensors
    order = SampleOrder(samples=len(tokens), set_size=len(tokens), global_batch_size=BATCH, seed=SEED)
    torch.manual_seed(mix(SEED, "model"))
    model = GPT(128, context_length=64, width=width, depth=depth, heads=4).to(dtype)
    decaying, others = ([one for one in model.parameters() if (one.ndim > 1) is decays] for decays in (True, False))
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]  # norms and biases don't decay
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for step in range(steps):
        batch = torch.tensor(order.global_batch(step))
        loss = 0.0
        for part in batch.chunk(PARTS):
            logits = model(tokens[part])
            share = cross_entropy(logits.flatten(0, 1), targets[part].flatten()) * len(part) / len(batch)
            share.backward()
            loss += share.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss)
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(train(int(sys.argv[1])), start=1):
        if step == 1 or step % 50 == 0:
            print(f"step {step:3}  loss {loss:.4f}")
