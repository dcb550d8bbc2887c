"""Small reference models. Any callable that returns an ``nn.Module`` works as well."""

from pipeline.models.gpt import GPT
from pipeline.models.mlp import MLP
from pipeline.models.pretrained import pretrained
from pipeline.models.resnet import resnet18, resnet50

__all__ = ["GPT", "MLP", "pretrained", "resnet18", "resnet50"]
