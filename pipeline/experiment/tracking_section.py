"""The section ``tracking`` of an experiment: where the results go."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_serializer,
    field_validator,
)

from pipeline.experiment.uris import expand_home, problem_of, without_credentials
from pipeline.experiment.values import NAMED, OR_NAME, Component, FilePath, Section, Writable


class RegisteredModel(Section):
    """Model in MLflow's registry that gets the trained model as a new version."""

    name: Annotated[str, Field(pattern=r"^[^\s/:'\"]([^/:'\"]*[^\s/:'\"])?$", max_length=250)]
    """Name of the registered model, without slash, colon and quotes. The model is created if it does not exist."""
    alias: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=250)] | None = None
    """Alias that the version gets, e.g. champion: letters, digits, dash and underscore."""

    @field_validator("alias")
    @classmethod
    def _is_free(cls, alias: str | None) -> str | None:
        if alias is not None and (alias.lower() == "latest" or (alias[0] in "vV" and alias[1:].isdecimal())):
            raise ValueError("MLflow reserves this word for versions. Use another alias.")
        return alias


def _logger(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(f"write {', '.join(get_args(LoggerName))}, or _target_: package.name") from None


LoggerName = Literal["tensorboard", "wandb"]
Logger = Annotated[LoggerName | Component, WrapValidator(_logger)]


class Tracking(Section):
    """Destinations of the results: MLflow, a folder for each run, and other trackers."""

    uri: Writable = "sqlite:///mlflow.db"
    """MLflow tracking URI: sqlite:///FILE or the http(s) address of a server. Without it, the environment variable
    MLFLOW_TRACKING_URI is used, then the default."""
    experiment: Writable | None = None
    """Name of the MLflow experiment; default: the name of this experiment."""
    directory: FilePath = "runs"
    """Folder for the run folders. Each run folder contains the run's event log, worker logs and report."""
    log_model: bool = True
    """Log the trained model to MLflow. The run's folder always contains the weights."""
    register_model: Annotated[RegisteredModel | None, NAMED, OR_NAME] = None
    """Registered model that gets the trained model of a completed run as a new version: its name, or a section with an
    alias. A run is registered once. Of a sweep, only the best trial is registered."""
    run_name: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    """Name of the run in MLflow. Default: strategy and workers, e.g. "ddp, 2 workers". Trials of a sweep have other
    names."""
    tags: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./ -]*$", max_length=250)], str] = {}
    """Additional tags of the run in MLflow, e.g. {team: vision}. The names of pipeline's tags cannot be used."""
    loggers: tuple[Logger, ...] = ()
    """Destinations in addition to MLflow: tensorboard, wandb, or components. tensorboard and wandb write into the run's
    folder; wandb also sends the results to Weights & Biases. Their packages must be installed. A component is built
    with the run's folder and receives every event."""

    @property
    def named_loggers(self) -> tuple[str, ...]:
        """Loggers that are given by name."""
        return tuple(logger for logger in self.loggers if isinstance(logger, str))

    @property
    def custom_loggers(self) -> dict[str, Component]:
        """Components among the loggers, by key."""
        loggers = enumerate(self.loggers)
        return {f"tracking.loggers[{i}]": logger for i, logger in loggers if isinstance(logger, Component)}

    @field_serializer("uri")
    def _written_without_credentials(self, uri: str) -> str:
        """Remove credentials: only the driver needs them, not files, MLflow parameters or worker processes."""
        return without_credentials(uri)

    @field_validator("uri")
    @classmethod
    def _is_usable(cls, uri: str) -> str:
        if problem := problem_of(uri):
            raise ValueError(problem)
        return expand_home(uri)
