"""The experiment file as frozen, strict types; their docstrings are the descriptions in JSON Schema and docs/keys.md.

The larger sections have files of their own: `benchmark_section`, `loader_section`,
`parallel`, `sweep`, `tracking_section` and `train`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    model_validator,
)

from pipeline.experiment import lightning_module
from pipeline.experiment.benchmark_section import Benchmark
from pipeline.experiment.finetuning import Optimizer
from pipeline.experiment.loader_section import Loader
from pipeline.experiment.named_optimizers import NamedOptimizer
from pipeline.experiment.parallel import Parallel
from pipeline.experiment.sweep import Sweep
from pipeline.experiment.tracking_section import Tracking
from pipeline.experiment.train import Train
from pipeline.experiment.values import (
    Component,
    FilePath,
    Mode,
    NotNegative,
    Positive,
    PositiveFloat,
    Section,
)


class Checkpoint(Section):
    """Checkpoints of the training state: at the end of each epoch and of the run, and at the intervals set here."""

    every_steps: Positive | None = None
    """Steps between two checkpoints inside an epoch."""
    every_minutes: PositiveFloat | None = None
    """Maximum time between two checkpoints, checked whenever metrics are reported."""
    keep: NotNegative = 2
    """Number of latest checkpoints to keep. 0 saves no checkpoints, so training cannot be resumed."""
    best: Annotated[str, Field(pattern=r"^validation/.")] | None = None
    """A metric such as validation/accuracy. The checkpoint with the best value is also kept. Its weights are the result
    of the run: they are saved, logged to MLflow, and evaluated on the test set."""
    mode: Mode = "auto"
    """Direction of ``best``: min if lower is better, max if higher is better. auto uses torchmetrics' higher_is_better,
    and min for validation/loss. auto is an error for metrics without higher_is_better."""
    directory: FilePath | None = None
    """Folder or address (s3://bucket/folder) for checkpoints, with a subfolder per run. Default: the run's folder."""


class Metric(Component):
    """Metric: ``_target_: package.name`` with keyword arguments, and the sets that it is computed for."""

    on: tuple[Literal["train", "validation"], ...] = ("validation",)
    """``[train, validation]`` also computes the metric for the samples of training steps since the last report."""

    @property
    def is_trained(self) -> bool:
        """True if it is also computed for training steps."""
        return "train" in self.on


class Experiment(Section):
    """Experiment: model, data, training and parallel strategy."""

    extends: Annotated[str | None, Field(exclude=True)] = None
    """Path of an experiment file to extend, relative to this file. Its keys are used where this file does not set them.
    Sections are merged key by key; lists and components with a ``_target_`` are replaced."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """The experiment's name: letters, digits, dot, dash and underscore."""
    seed: NotNegative = 0
    """Seed of the global random generators of torch, NumPy and Python. Each random choice depends only on the seed and
    on the step, epoch or sample. Generators that your code creates are not seeded, and not saved in checkpoints."""
    model: Component
    """Any callable that returns a torch.nn.Module. Required unless ``task`` is pipeline.tasks.Lightning with a
    ``module``."""
    data: Component
    """Any callable that returns a training dataset, a validation dataset or None, and optionally a test dataset. The
    datasets are map-style or iterable. The test dataset is evaluated once, at the end."""
    sampler: Component | None = None
    """Any callable (training set, epoch, generator) that returns the indices of an epoch's samples, such as
    pipeline.data.balanced or pipeline.data.by_length (docs/data.md). Epochs count from 0. All epochs have the same
    number of indices, and an index may repeat. Default: shuffled, each sample once per epoch."""
    loader: Loader = Loader()
    loss: Component | None = None
    """Any callable (outputs, targets) -> scalar mean over the samples, or a loss of torch (docs/losses.md). Required
    unless ``task`` is given."""
    task: Component | None = None
    """Any callable (model, batch) -> pipeline.tasks.Loss, or a plain scalar, the mean over the samples of the batch.
    For batches other than (inputs, targets), and losses other than a mean over samples.
    ``{_target_: pipeline.tasks.Lightning, module: {_target_: mypackage.LitNet}}`` uses a LightningModule unchanged,
    instead of ``model``, ``loss``, ``optimizer`` and ``scheduler``."""
    metrics: Mapping[str, Metric] = {}
    """torchmetrics metrics for the validation set, by name. A metric computes a number, a number per class (NAME_0), a
    confusion matrix (NAME_true_0_predicted_1), or a ROC or precision-recall curve. The last evaluation writes curves,
    and results with more than 1,000 values, to metrics/NAME.csv and .png. ``on: [train, validation]`` also reports a
    metric as train/NAME, for the samples of training steps since the last report."""
    optimizer: Optimizer | None = None
    """Any callable (parameters of model, loss and task) -> optimizer, with ``groups`` for parameters with separate
    settings. Required unless ``optimizers`` is given. torch's SGD, Adam and AdamW are fused unless ``fused: false`` is
    given. Optimizers with train() and eval(), such as schedule-free optimizers, are in eval() mode during evaluation
    and export."""
    scheduler: Component | None = None
    """Any callable (optimizer) -> learning-rate scheduler; may use ${total_steps} and ${steps_per_epoch}. Schedulers in
    its arguments, as a SequentialLR has them, also get the optimizer."""
    optimizers: Mapping[str, NamedOptimizer] = {}
    """Several optimizers by name, instead of ``optimizer``, for a task (model, batch, update) that calls ``update(name,
    loss)`` for each of them. ``params`` lists the names of the parameters: ``{critic: {_target_: torch.optim.Adam,
    params: "critic.*"}}``. ``every: 5`` updates in every fifth step only. ``clip_grad_norm`` replaces
    train.clip_grad_norm for this optimizer."""
    schedulers: Mapping[str, Component] = {}
    """Schedulers of ``optimizers``, by the same names, instead of ``scheduler``. An optimizer may have no scheduler."""
    hooks: tuple[Component, ...] = ()
    """Your own additions to the training. Each is any callable that returns a pipeline.train.Hook, which may change
    batches and gradients, follow steps and evaluations, and save state in checkpoints (docs/extend.md). They are called
    after the built-in hooks, in the order of the list."""
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    benchmark: Benchmark = Benchmark()
    tracking: Tracking = Tracking()
    sweep: Sweep | None = None
    """Parameters that ``pipeline sweep`` varies; other commands ignore this section."""

    @model_validator(mode="before")
    @classmethod
    def _with_module(cls, value: Any) -> Any:
        """Fill in the model, optimizer and scheduler that a LightningModule stands for."""
        return lightning_module.completed(value)

    @model_validator(mode="wrap")
    @classmethod
    def _with_global_batch_size(cls, value: Any, handler: ModelWrapValidatorHandler["Experiment"]) -> "Experiment":
        """Fill in the global batch size that ``train.batch_size_per_worker`` stands for."""
        experiment = handler(value)
        train, share = experiment.train, experiment.train.batch_size_per_worker
        if share is None or train.global_batch_size:
            return experiment
        filled = train.model_copy(update={"global_batch_size": share * experiment.parallel.workers})
        filled.model_fields_set.discard("global_batch_size")  # the file doesn't give it
        return experiment.model_copy(update={"train": filled})

    @property
    def by_optimizer(self) -> Mapping[str, "Experiment"]:
        """Experiments with one of several optimizers each, and its scheduler, by its name; empty without several."""
        return {
            name: self.model_copy(
                update={"optimizer": one, "scheduler": self.schedulers.get(name), "optimizers": {}, "schedulers": {}}
            )
            for name, one in self.optimizers.items()
        }

    def batch_keys(self, global_batch_size: int) -> dict[str, int | None]:
        """Return the values of keys that make a global batch of a size: by worker if the file gives it by worker."""
        if self.train.batch_size_per_worker is None:
            return {"train.global_batch_size": global_batch_size}
        share, rest = divmod(global_batch_size, self.parallel.workers)
        if rest:
            return {"train.batch_size_per_worker": None, "train.global_batch_size": global_batch_size}
        return {"train.batch_size_per_worker": share}


def followed(experiment: Experiment) -> dict[str, str]:
    """Return the validation metrics that decide something in a training, by the key that names them."""
    stopping = experiment.train.early_stopping
    named = {
        "checkpoint.best": experiment.checkpoint.best,
        "train.early_stopping.metric": stopping.metric if stopping is not None else None,
        "train.scheduler_metric": experiment.train.scheduler_metric,
    }
    return {key: metric for key, metric in named.items() if metric is not None}
