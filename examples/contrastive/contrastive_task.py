import torch
from contrastive import contrast

from pipeline.tasks import StepOutput, gathered


class Contrast:
    def __call__(self, model, batch):
        first, second = batch
        both = model(torch.cat([first, second]))
        return StepOutput(contrast(gathered(torch.stack(both.chunk(2), dim=1))), None, None)
