"""The experiment file as frozen, strict types. Field descriptions end up in the JSON Schema that editors read."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from pipeline.config.parallel import Parallel
from pipeline.config.sweep import Sweep
from pipeline.config.train import Train
from pipeline.config.uris import problem_of, without_credentials
from pipeline.config.values import (
    Component,
    Mode,
    NotNegative,
    Positive,
    PositiveFloat,
    Section,
    StrategyName,
    Writable,
)


class Loader(Section):
    """The DataLoader of each worker."""

    num_workers: NotNegative = 0
    """Loader processes for each worker; 0 loads in the training process."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Page-locked batches; auto: yes on a GPU."""
    persistent_workers: bool = True
    """Keep loader processes between epochs."""
    prefetch_factor: Positive = 2
    """Batches that each loader process prepares ahead."""
    collate: Component | None = None
    """A callable's factory for collate_fn; torch's default_collate otherwise."""


class Checkpoint(Section):
    """When and where the state of training is saved: at the end of each epoch and of the run, and as written here."""

    every_steps: Positive | None = None
    """Steps between two checkpoints inside an epoch."""
    every_minutes: PositiveFloat | None = None
    """Longest time between two checkpoints; looked at whenever metrics are reported."""
    keep: NotNegative = 2
    """Newest checkpoints to keep; 0 saves none, and training can't be resumed."""
    best: Annotated[str, Field(pattern=r"^validation/.")] | None = None
    """A metric such as validation/accuracy: the checkpoint with its best value is kept besides."""
    mode: Mode = "auto"
    """Whether small or large values of ``best`` are good; auto: as torchmetrics' higher_is_better says, small of
    validation/loss, and refused where nothing says it."""
    directory: Writable | None = None
    """Folder or address (s3://bucket/folder) with one folder for each run; default: the run's own folder."""


class Comparison(Section):
    """One entry of ``compare``: what differs from ``parallel``."""

    strategy: StrategyName
    """Strategy of this entry."""
    workers: Positive | None = None
    """Workers of this entry; default: parallel.workers where the strategy runs several processes, else 1."""
    options: Mapping[str, Any] = {}
    """The strategy's own options."""


class Measure(Section):
    """How throughput is measured in a short measurement such as the baseline."""

    warmup_steps: NotNegative = 3
    """Steps that are not counted."""
    steps: Positive = 5
    """Steps in one timed window."""
    windows: Positive = 3
    """Timed windows; median and spread are taken over them."""

    @property
    def total_steps(self) -> int:
        """Steps of one measurement."""
        return self.warmup_steps + self.steps * self.windows


class Tracking(Section):
    """Where results go."""

    uri: Writable = "sqlite:///mlflow.db"
    """MLflow tracking URI: sqlite:///FILE or a server's http(s) address."""
    experiment: Writable | None = None
    """MLflow experiment; default: this experiment's name."""
    directory: Writable = "runs"
    """Folder for the journal, the logs and the report of each run."""
    log_model: bool = True
    """Log the trained model to MLflow; the weights stay in the run's folder in any case."""
    trackers: tuple[Component, ...] = ()
    """Trackers of your own, beside MLflow: each is called with the run's folder, and then gets every event."""

    @field_serializer("uri")
    def _written_without_credentials(self, uri: str) -> str:
        """They stay in the driver, which alone talks to the store: not in files, parameters or worker processes."""
        return without_credentials(uri)

    @field_validator("uri")
    @classmethod
    def _is_usable(cls, uri: str) -> str:
        if problem := problem_of(uri):
            raise ValueError(problem)
        return uri


class Experiment(Section):
    """One experiment: model, data and parallel strategy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the experiment: letters, digits, dot, dash and underscore."""
    seed: NotNegative = 0
    """Every random choice is a pure function of this seed and of the step, epoch or sample it belongs to: torch's,
    NumPy's and Python's global generators are seeded with it. A generator that your code makes itself isn't, and no
    checkpoint holds it."""
    model: Component
    """Any callable that returns a torch.nn.Module."""
    data: Component
    """Any callable that returns a training and a validation dataset (map-style; the second may be None), or
    pipeline.data.streamed."""
    loader: Loader = Loader()
    loss: Component | None = None
    """Any callable (outputs, targets) -> scalar mean over the samples, or a loss of torch (docs/losses.md); needed
    unless ``task`` is given."""
    task: Component | None = None
    """A pipeline.tasks.Task, for what is not (inputs, targets) -> loss, or divided by something else than samples."""
    metrics: Mapping[str, Component] = {}
    """torchmetrics metrics of the validation set, by name: of a number, of one for each class, or ROC and
    precision-recall curves, which the last evaluation writes to metrics/NAME.csv and .png."""
    optimizer: Component
    """Called with the parameters of model, loss and task. torch's SGD, Adam and AdamW run fused unless it says ``fused:
    false``.
    Where it has train() and eval(), as schedule-free ones do, what is evaluated and exported is in eval()."""
    scheduler: Component | None = None
    """Called with the optimizer; may use ${total_steps} and ${steps_per_epoch}."""
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    parallel: Parallel = Parallel()
    compare: Annotated[tuple[Comparison, ...], Field(min_length=1)] = (Comparison(strategy="single"),)
    """What the run is compared with; the first entry is the baseline of the speedup."""
    measure: Measure = Measure()
    tracking: Tracking = Tracking()
    sweep: Sweep | None = None
    """What ``pipeline sweep`` tries; other commands leave it out."""

    @property
    def is_streamed(self) -> bool:
        """Whether Ray Data sends rows to the workers, instead of workers that read samples."""
        return self.data.target == "pipeline.data.streamed"
