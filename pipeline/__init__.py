"""Declarative experiments for data-parallel PyTorch training, with measured speedups.

`pipeline run experiments/resnet.yaml` is the whole story; start reading at `pipeline.runner`.
"""
