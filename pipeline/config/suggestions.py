"""Components that an experiment is likely to name: editors and shells offer them. Any other name works as well."""

from collections.abc import Mapping

SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "model": (
        "pipeline.models.MLP",
        "pipeline.models.GPT",
        "pipeline.models.resnet18",
        "pipeline.models.resnet34",
        "pipeline.models.resnet50",
    ),
    "data": (
        "pipeline.data.digits",
        "pipeline.data.cifar10",
        "pipeline.data.characters",
        "pipeline.data.arrays",
        "pipeline.data.tokens",
        "pipeline.data.shards",
        "pipeline.data.streamed",
    ),
    "loss": (
        "torch.nn.CrossEntropyLoss",
        "torch.nn.BCEWithLogitsLoss",
        "torch.nn.MSELoss",
        "torch.nn.L1Loss",
        "torch.nn.SmoothL1Loss",
        "torch.nn.NLLLoss",
    ),
    "task": ("pipeline.tasks.Supervised", "pipeline.tasks.LanguageModel"),
    "metrics": (
        "torchmetrics.classification.MulticlassAccuracy",
        "torchmetrics.classification.MulticlassF1Score",
        "torchmetrics.classification.MulticlassAUROC",
        "torchmetrics.classification.BinaryAccuracy",
        "torchmetrics.classification.BinaryAUROC",
        "torchmetrics.regression.MeanSquaredError",
        "torchmetrics.regression.MeanAbsoluteError",
        "torchmetrics.text.Perplexity",
    ),
    "optimizer": (
        "torch.optim.SGD",
        "torch.optim.AdamW",
        "torch.optim.Adam",
        "torch.optim.RMSprop",
        "torch.optim.Adagrad",
        "torch.optim.NAdam",
    ),
    "scheduler": (
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.optim.lr_scheduler.OneCycleLR",
        "torch.optim.lr_scheduler.StepLR",
        "torch.optim.lr_scheduler.MultiStepLR",
        "torch.optim.lr_scheduler.LinearLR",
        "torch.optim.lr_scheduler.ReduceLROnPlateau",
    ),
}
"""By section. A test holds them to be there, and the built-in models, data and tasks to be complete."""
