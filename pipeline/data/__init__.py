"""Small real datasets. Any other callable that returns a training and a validation dataset works as well."""

from pipeline.data.cifar import cifar10
from pipeline.data.handwriting import digits
from pipeline.data.splits import Splits
from pipeline.data.text import characters

__all__ = ["Splits", "characters", "cifar10", "digits"]
