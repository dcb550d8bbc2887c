"""The section ``train`` of an experiment, and the optimizers: length and method of training, weights to start from."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WrapValidator

from pipeline.experiment.values import (
    Component,
    FilePath,
    Mode,
    NotNegative,
    OrSwitch,
    Positive,
    PositiveFloat,
    Section,
)
from pipeline.wording import counted

Pattern = Annotated[str, Field(min_length=1)]
PatternOrPatterns = Pattern | Annotated[tuple[Pattern, ...], Field(min_length=1)]
Patterns = bool | str | tuple[str, ...]
"""Module names; ``*`` matches any part between two dots. true: the repeated blocks of the model."""


class StartFrom(Section):
    """Initial weights of the model, from the result of a run or from a safetensors file."""

    run: FilePath | None = None
    """Run to load the weights from: a unique part of its id, or its folder. Loads the best weights if the run sets
    ``checkpoint.best``, otherwise the last weights."""
    file: FilePath | None = None
    """Path of a safetensors file, relative to the working directory, instead of ``run``."""
    strict: bool = True
    """Require weights with exactly the names and shapes of the model. false: parameters that are missing or have
    another shape keep their initial values, and weights that the model does not have are ignored. Both are reported."""
    rename: Mapping[str, str] = {}
    """Mapping of old to new name prefixes, up to a dot. ``backbone: encoder`` renames backbone.0.weight to
    encoder.0.weight, ``"": encoder`` adds a prefix, and ``module: ""`` removes a prefix. The longest match counts."""


class ParameterGroup(Section):
    """Parameters with separate settings: ``match``, and any argument of the optimizer, such as lr."""

    model_config = ConfigDict(extra="allow")

    match: PatternOrPatterns
    """Name or names of parameters. An asterisk matches any characters, including dots. A parameter belongs to the first
    group that matches it. Parameters that no group matches use the optimizer's arguments."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns as a tuple."""
        return (self.match,) if isinstance(self.match, str) else self.match

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings as written in the file, such as lr."""
        return self.model_extra or {}

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{', '.join(self.patterns)} with {settings}"


class Optimizer(Component):
    """Optimizer: ``_target_: package.name`` with keyword arguments, and groups of parameters with other arguments."""

    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with other arguments, such as ``{match: "*.bias", weight_decay: 0}``."""


class NamedOptimizer(Optimizer):
    """Optimizer with a name: ``_target_: package.name`` with keyword arguments, and the parameters that it trains."""

    params: PatternOrPatterns
    """Name or names of the parameters that it trains. An asterisk matches any characters, including dots. Each
    trainable parameter belongs to exactly one optimizer. Names of the task's parameters start with ``task.``."""
    every: Positive | None = None
    """Steps between two updates. 5 updates in the first step and in every fifth step after it. The loss is computed and
    reported in all steps. Default: update in each step. Schedulers count all steps."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum norm of its gradients, instead of train.clip_grad_norm."""

    def updates_in(self, step: int) -> bool:
        """Return True if a step, counted from 0, updates its parameters."""
        return step % (self.every or 1) == 0

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns as a tuple."""
        return (self.params,) if isinstance(self.params, str) else self.params


class Compile(Section):
    """Options of torch.compile (Ansel et al. 2024, "PyTorch 2", doi 10.1145/3620665.3640366), by torch's names."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """reduce-overhead replays CUDA graphs, for models with short kernels; max-autotune also tunes the kernels."""
    dynamic: bool = False
    """Compile once for inputs of all sizes, instead of once for each size."""
    fullgraph: bool = False
    """Raise an error if the model cannot be compiled as one graph, instead of compiling its parts."""

    @property
    def has_cuda_graphs(self) -> bool:
        """True if the mode replays CUDA graphs on GPUs, whose outputs the next replay overwrites."""
        return self.mode in ("reduce-overhead", "max-autotune")


class Ema(Section):
    """Exponential moving average of the weights (after Polyak and Juditsky 1992, doi 10.1137/0330046).

    The averaged weights are evaluated and saved as the trained model.
    """

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Decay of the average: after each step it is decay * average + (1 - decay) * weight."""
    start_step: NotNegative = 0
    """Steps before averaging starts. Until then the averages equal the weights."""


class EarlyStopping(Section):
    """Early end of the training, once a validation metric has stopped improving."""

    metric: Annotated[str, Field(pattern=r"^validation/.")] = "validation/loss"
    """The metric to follow, such as validation/accuracy."""
    patience: Positive = 3
    """Evaluations in a row without improvement after which training ends."""
    min_delta: Annotated[float, Field(ge=0, strict=True)] = 0.0
    """Minimum improvement: a value must be better than the best value so far by more than this."""
    mode: Mode = "auto"
    """Direction of ``metric``, as in ``checkpoint.mode``."""

    @property
    def condition(self) -> str:
        """Condition in words."""
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"once {counted(self.patience, 'evaluation')} in a row did not improve {self.metric}{least}"


def _or_null(schema: dict[str, Any]) -> None:
    limits = {name: schema.pop(name) for name in ("type", "exclusiveMinimum")}
    schema.pop("default", None)
    schema["anyOf"] = [limits, {"type": "null"}]


BatchSize = Annotated[Positive, WrapValidator(lambda value, handler: 0 if value is None else handler(value))]
"""Positive number that another key may replace; 0 if it isn't given."""


class LearningRateScaling(Section):
    """Learning-rate scaling with the global batch size (``linear``: Goyal et al. 2017, arXiv 1706.02677)."""

    rule: Literal["none", "linear", "sqrt"] = "none"
    """Factor on the lr of the optimizer, or of OneCycleLR and CyclicLR. none: 1. linear: global batch size divided by
    base_batch_size. sqrt: the square root of the linear factor."""
    base_batch_size: Positive = 256
    """Global batch size that the optimizer's ``lr`` was chosen for."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises linearly from the unscaled to the scaled value; rule none: from 0."""


class Train(Section):
    """Length and method of training."""

    epochs: Positive | None = None
    """Passes over the training set. Required unless ``steps`` is given."""
    steps: Positive | None = None
    """Optimizer steps, instead of ``epochs``. The last epoch may be incomplete."""
    minutes: PositiveFloat | None = None
    """Time of training after which it ends, if ``epochs`` or ``steps`` are not over before. Only steps count: not the
    start, evaluations and checkpoints. A resumed run counts the time of before. How many steps fit differs from run to
    run, so such a training cannot be repeated exactly; schedules have the length of ``epochs`` or ``steps``."""
    global_batch_size: Annotated[BatchSize, Field(json_schema_extra=_or_null)] = 0
    """Samples per optimizer step over all workers, independent of the number of workers. Required unless
    ``batch_size_per_worker`` is given."""
    batch_size_per_worker: Positive | None = None
    """Samples per optimizer step and worker, instead of ``global_batch_size``. The global batch size is this value
    times parallel.workers (the maximum if training is elastic). It stays constant if the run loses workers or is
    resumed. The baseline, a benchmark (except with --batch-sizes) and the trials of a sweep use the same global
    batch size. benchmark --batch-sizes recommends a value for this key."""
    gradient_accumulation: Positive = 1
    """Micro-batches per worker and optimizer step."""
    evaluation_batch_size: Positive | None = None
    """Samples per batch of validation and test over all workers. Default: the size of a micro-batch of training. The
    results are the same with any size, unless a layer evaluates with batch statistics (track_running_stats: false)."""
    batch_transform: Component | None = None
    """Any callable that returns a callable (inputs, targets) -> (inputs, targets), such as MixUp or CutMix. It changes
    each micro-batch of training on its device. Evaluations do not use it. It mixes samples of one worker, so training
    depends on the number of workers and on gradient_accumulation."""
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """Floating-point precision. bf16 and fp16 use autocast; fp64 is for comparing two runs to the last digits."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of fp32 matrix products, as in torch.set_float32_matmul_precision. high uses TF32 on the tensor cores
    of Ampere and later GPUs; medium may also use bf16. Default: torch's default, highest."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its convolution kernels for each input shape and use the fastest, on GPUs only. Each run may use
    other kernels, so results may differ in the last digits, also between an uninterrupted and a resumed run."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """Memory format of image batches (four dimensions) and convolutions; tensor cores are faster with channels_last."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum global gradient norm; larger gradients are clipped to it."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinite loss or gradient. stop: end the run. skip: skip the optimizer step. A NaN or
    infinite validation loss ends training before the epoch's checkpoint; with skip it is a warning."""
    scheduler_interval: Literal["step", "epoch"] = "step"
    """Advance the scheduler after each step, including steps that were skipped or overflowed in fp16, or after each
    epoch."""
    scheduler_metric: Annotated[str, Field(pattern=r"^validation/.")] | None = None
    """Metric for a ReduceLROnPlateau scheduler, such as validation/accuracy. Default: validation/loss. The scheduler's
    ``mode`` (torch's default: min) must be the direction in which the metric improves."""
    lr_scaling: LearningRateScaling = LearningRateScaling()
    """Learning-rate scaling with the global batch size."""
    log_every_steps: Literal["auto"] | Positive = "auto"
    """Training steps of a reported point. auto: one point in 0.33 s, or one for each step that takes longer. 1: each
    step has its point. A point of several steps is their mean; the loss also has its minimum and maximum. With auto,
    the loss of a result is the mean of the last 20 steps. The file losses.npy of a run has the loss of every step in
    any case."""
    evaluate_every_epochs: Positive = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    evaluate_every_steps: Positive | None = None
    """Steps between two evaluations, instead of evaluate_every_epochs. The last step is always evaluated."""
    early_stopping: OrSwitch[EarlyStopping] = None
    """Stop training once a validation metric has stopped improving: true for the defaults, or a section. Checkpoints
    contain the count, so a resumed run ends at the same step."""
    compile: OrSwitch[Compile] = None
    """Compile the model with torch.compile: true for the defaults, or a section. Compile time is reported separately,
    and excluded from all measurements."""
    activation_checkpointing: Patterns = False
    """Modules, such as layer1 or blocks.*, that recompute their activations in the backward pass instead of storing
    them. This needs less memory and more time; the losses are the same. true: the repeated blocks of the model."""
    ema: OrSwitch[Ema] = None
    """Exponential moving average of the weights: true for the defaults, or a section. The averaged weights are
    evaluated and logged instead of the trained weights."""
    start_from: StartFrom | None = None
    """Weights to start training from, instead of the model's initial weights: the result of a run, or a safetensors
    file."""
    freeze: tuple[Pattern, ...] = ()
    """Names of parameters that are not trained. An asterisk matches any characters, including dots. Frozen parameters
    have no gradient and are not passed to the optimizer. BatchNorm layers whose parameters are all frozen stay in
    evaluation mode."""

    @property
    def followed_by_plateau(self) -> str:
        """Metric that a ReduceLROnPlateau follows."""
        return self.scheduler_metric or "validation/loss"

    def steps_of(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of a training."""
        return self.steps or steps_per_epoch * (self.epochs or 0)

    def evaluation_share(self, workers: int) -> int:
        """Return the samples of each of so many workers in a batch of evaluation."""
        size = self.evaluation_batch_size or self.global_batch_size // self.gradient_accumulation
        return max(1, size // workers)

    @property
    def length(self) -> str:
        """Length in words, e.g. "10 epochs" or "500 steps, 5 min at most"."""
        most = counted(self.steps, "step", spec=",") if self.steps else counted(self.epochs or 0, "epoch")
        return most if self.minutes is None else f"{most}, {self.minutes:g} min at most"

    @property
    def extras(self) -> tuple[str, ...]:
        """Optional features that are enabled, in words, e.g. "torch.compile (default)"."""
        words = []
        if self.freeze:
            words.append(f"frozen parameters ({', '.join(self.freeze)})")
        if self.batch_transform is not None:
            words.append(f"batches transformed by {self.batch_transform.target}")
        if self.matmul_precision not in (None, "highest"):
            words.append(f"train.matmul_precision: {self.matmul_precision}")
        if self.cudnn_benchmark:
            words.append("train.cudnn_benchmark")
        if self.compile is not None:
            flags = [name for name in ("dynamic", "fullgraph") if getattr(self.compile, name)]
            words.append(f"torch.compile ({', '.join([self.compile.mode, *flags])})")
        if recomputed := self.activation_checkpointing:
            names = (recomputed,) if isinstance(recomputed, str) else recomputed
            of = "the repeated blocks" if names is True else ", ".join(names or ())
            words.append(f"activation checkpointing of {of}")
        if self.ema is not None:
            start = f" from step {self.ema.start_step} on" if self.ema.start_step else ""
            words.append(f"EMA of the weights (decay {self.ema.decay:g}{start}), evaluated and logged as the model")
        return tuple(words)
