"""Experiments that train the same at any number of workers, in micro-batches and resumed: a feature adds its row.

`contract/test_same_on_ranks.py` trains them on two ranks, `integration/test_same_on_four_ranks.py` on four.
"""

from typing import Any

import toy_contrastive
import toy_gans
import toys
from same_on_ranks import Row

ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.05, "weight_decay": 0.1}
OF = "torchmetrics.classification."


def data(samples: int, validation: int = 10) -> dict[str, Any]:
    """Return the section data of a regression."""
    return {"data": {"_target_": "toys.regression", "samples": samples, "validation": validation}}


# Batches, shares and micro-batches

LAST_BATCHES = {
    "one sample left": Row({"train": {"global_batch_size": 7}, "optimizer": ADAM}, stopped=3, is_saved_by_all=True),
    "one sample": Row({**data(1, 1), "train": {"global_batch_size": 2, "epochs": 4}}),
    "uneven shares": Row({**data(25, 4), "train": {"global_batch_size": 7}}, stopped=4),
    "in fp32": Row({"optimizer": ADAM, "train": {"precision": "fp32"}}, is_saved_by_all=True, tolerance=1e-5),
    # Resumed where the first step of a process has more micro-batches on one rank than on the other.
    **{
        f"static graph, batches of {size}": Row(
            {"train": {"global_batch_size": size, "gradient_accumulation": 2}},
            stopped=stopped,
            options={"static_graph": True},
        )
        for size, stopped in ((3, 4), (7, 3), (19, 1))
    },
}

# What trains: the optimizer, the parameters, the gradients

SPARSE = {
    "model": {"_target_": "toys.SparseWords"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
    "train": {"clip_grad_norm": 0.01, "on_nonfinite": "skip"},
}
PARAMETERS = {
    **{
        f"sparse gradients, {name}": Row(SPARSE, options=options)
        for name, options in (
            ("default", {}),
            ("static_graph", {"static_graph": True}),
            ("unused", {"find_unused_parameters": True}),
        )
    },
    **{
        f"frozen, groups, {strategy}": Row(
            {
                "model": {"_target_": "toys.NormedNet"},
                "optimizer": {
                    **ADAM,
                    "groups": [{"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr": 0.02}],
                },
                "train": {"freeze": ["body.1.*"], "clip_grad_norm": 1.0},
            },
            strategy=strategy,
            initial=toys.NormedNet,
            is_saved_by_all=strategy == "fsdp",
        )
        for strategy in ("ddp", "fsdp")
    },
    "a hook that draws": Row({"hooks": [{"_target_": "toys.NoisyGradients"}]}),
    "a loss of its own": Row(
        {
            "model": {"_target_": "toys.LossOfItsOwn"},
            "data": {"_target_": "toys.sequences"},
            "loss": None,
            "task": {"_target_": "pipeline.tasks.FromModel"},
        },
        initial=toys.LossOfItsOwn,
    ),
}

# How long it trains, and with which result

BEST = {
    "checkpoint": {"best": "validation/loss", "mode": "max"},
    "data": {"_target_": "toys.with_test", "samples": 13},
    "train": {"epochs": 3},
}
LENGTH = {
    "early stopping": Row(
        {
            "train": {
                "epochs": 20,
                "evaluate_every_steps": 2,
                "early_stopping": {"patience": 3, "min_delta": 0.02},
            },
        },
        stopped=7,
    ),
    **{
        f"best weights, {strategy}": Row(
            BEST, strategy=strategy, is_saved_by_all=strategy == "fsdp", evaluated=("validation", "test")
        )
        for strategy in ("ddp", "fsdp")
    },
}

# Which samples form a batch

ORDERED: dict[str, dict[str, Any]] = {
    "balanced": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3},
        "data": {"_target_": "toys.imbalanced"},
        "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
        "sampler": {"_target_": "pipeline.data.balanced"},
    },
    "length": {
        "model": {"_target_": "torch.nn.Linear", "in_features": 30, "out_features": 1},
        "data": {"_target_": "toys.ragged"},
        "loader": {"collate": {"_target_": "toys.padded"}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3},
        "sampler": {"_target_": "pipeline.data.by_length"},
    },
    "function": {
        "sampler": {"_target_": "toys.twice"},
        "train": {"global_batch_size": None, "batch_size_per_worker": 2},
        "parallel": {"strategy": "ddp", "launcher": "torchrun", "workers": 4},
    },
    "iterable": {
        "data": {"_target_": "toy_streams.stream", "kind": "Shuffled", "validation": True},
        "train": {"global_batch_size": 6},  # four in the last batch of an epoch, so that some ranks have none
    },
    "endless": {
        "data": {"_target_": "toy_streams.stream", "kind": "Stateful", "validation": True},
        "train": {"epochs": None, "steps": 8, "global_batch_size": 6},
    },
}
ORDERS = {
    f"order: {name}": Row(sections, stopped=3, is_saved_by_all=name == "endless") for name, sections in ORDERED.items()
}

# Losses and metrics over all samples of a batch or set

METRICS = {
    "auroc": {"_target_": f"{OF}MulticlassAUROC", "num_classes": 3},
    "same": {"_target_": f"{OF}MulticlassAUROC", "num_classes": 3},
    "ap": {"_target_": f"{OF}MulticlassAveragePrecision", "num_classes": 3, "average": "none"},
    "accuracy": {"_target_": f"{OF}MulticlassAccuracy", "num_classes": 3},
    "samples": {"_target_": f"{OF}MulticlassAccuracy", "num_classes": 3, "average": "micro"},
    "confusion": {"_target_": f"{OF}MulticlassConfusionMatrix", "num_classes": 3},
    "worst": {
        "_target_": "torchmetrics.MinMaxMetric",
        "base_metric": {"_target_": f"{OF}MulticlassAUROC", "num_classes": 3},
    },
    "parts": {"_target_": "toy_metrics.Parts"},
}
"""List states that are concatenated, list states that aren't, both kinds in one, tensors, and metrics in a metric."""
GATHERED = {
    f"gathered: {name}": Row(sections, stopped=toy_contrastive.STOPPED, whole_batches=True)
    for name, sections in toy_contrastive.CASES.items()
}
GATHERED["gathered: both, fsdp"] = GATHERED["gathered: both"]._replace(strategy="fsdp")
MEANS = {
    **{
        f"metrics of {samples} samples": Row(
            {
                "model": {"_target_": "toys.likely_net"},
                "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
                "data": {"_target_": "toys.classification", "validation": samples},
                "metrics": METRICS,
                "train": {"global_batch_size": 6},
            },
            tolerance=1e-6,
            warned="metrics.worst.min_val",
        )
        for samples in (1, 5, 11)  # fewer than ranks; one batch; a last batch that not all ranks have
    },
    "evaluation batches of 3, fsdp": Row({"train": {"evaluation_batch_size": 3}}, strategy="fsdp"),
    "metrics of training steps": Row(
        {
            "model": {"_target_": "toys.likely_net"},
            "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
            "data": {"_target_": "toys.classification"},
            "metrics": {
                name: {**METRICS[name], "on": ["train", "validation"]} for name in ("auroc", "confusion", "parts")
            },
            "train": {"global_batch_size": 6, "evaluate_every_steps": 3},  # reports after the same steps each time
        },
        stopped=3,
        tolerance=1e-6,
    ),
}

OPTIMIZERS = {
    f"several optimizers, {name}": Row(
        sections,
        stopped=toy_gans.STOPPED,
        whole_batches=True,  # accumulation is refused
        counted="count",
        warned="model: each part of a batch updates buffer count",
    )
    for name, sections in toy_gans.CASES.items()
}
_ALL = LAST_BATCHES | PARAMETERS | LENGTH | ORDERS | GATHERED | MEANS
_LIKE_OTHERS = (
    "gathered: similar", "gathered: branching", "static graph, batches of 3", "static graph, batches of 19",
    "sparse gradients, unused", "metrics of 5 samples",
)  # fmt: skip
FOR_FOUR = OPTIMIZERS | {name: _ALL[name] for name in _LIKE_OTHERS}  # Rows that `make test` has no time for
ROWS = {name: row for name, row in _ALL.items() if name not in FOR_FOUR}
