import torch
from contrastive import contrast

from pipeline.tasks import gathered


class Contrast:
    def __call__(self, model, batch):
        first, second = batch
        both = model(torch.cat([first, second]))
        return contrast(gathered(torch.stack(both.chunk(2), dim=1)))
