"""The training of experiments/resnet.yaml as one would write it by hand for torchrun, timed by hand.

    torchrun --nproc-per-node 2 benchmarks/bare_ddp.py

Prints one line of JSON: the throughput of each window of steps after the warm-up. It shares model and data with the
experiment and nothing else with this project.
"""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from pipeline.data import digits
from pipeline.models import resnet18

GLOBAL_BATCH, WARMUP, STEPS, WINDOWS = 128, 3, 5, 3


def main() -> None:
    """Train as many steps as a measurement of ours has."""
    torch.set_num_threads(1)
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    train, _ = digits(image_size=32)
    model: nn.Module = resnet18(num_classes=10, in_channels=1, width=16, norm="group")
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)
    criterion = nn.CrossEntropyLoss()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=17)
    loader: DataLoader[object] = DataLoader(train, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    step, samples, windows, start = 0, 0, [], 0.0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step, samples = step + 1, samples + len(inputs) * world_size
            if step >= WARMUP and (step - WARMUP) % STEPS == 0:
                now = time.perf_counter()
                if step > WARMUP:
                    windows.append(samples / (now - start))
                samples, start = 0, now
            if len(windows) == WINDOWS:
                if rank == 0:
                    print(json.dumps(windows))
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
