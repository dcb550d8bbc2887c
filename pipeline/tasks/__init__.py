"""Tasks: the computation of the loss from a batch, by default ``loss(model(inputs), targets)``.

An experiment with other batches names its own class in ``task:``. A task calls ``model`` itself.
"""

from pipeline.tasks.gathering import gathered
from pipeline.tasks.lightning import Lightning
from pipeline.tasks.supervised import FromModel, LanguageModel, Supervised
from pipeline.tasks.trainee import Loss, Task, Trainee, count_samples, describe

__all__ = [
    "FromModel",
    "LanguageModel",
    "Lightning",
    "Loss",
    "Supervised",
    "Task",
    "Trainee",
    "count_samples",
    "describe",
    "gathered",
]
