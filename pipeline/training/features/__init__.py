"""The features of a training, and their order around a step's functions: the last one is outermost."""

from pipeline.config import keys
from pipeline.errors import ExperimentError
from pipeline.training.context import TrainContext
from pipeline.training.feature import Feature, name_of
from pipeline.training.features.alternation import Alternation
from pipeline.training.features.averaging import Averaging
from pipeline.training.features.batch_transform import BatchTransform
from pipeline.training.features.clipping import Clipping
from pipeline.training.features.compiled import Compiled
from pipeline.training.features.early_stopping import EarlyStopping
from pipeline.training.features.gathered_rows import Gathering
from pipeline.training.features.learned_gradients import LearnedGradients
from pipeline.training.features.logged import Logged
from pipeline.training.features.precision import Autocast, Scaled
from pipeline.training.features.rates import Rates
from pipeline.training.features.skipping import Skipping
from pipeline.training.features.task_steps import TaskSteps
from pipeline.training.features.time_limit import TimeLimit
from pipeline.training.features.train_metrics import TrainMetrics
from pipeline.training.features.weighted import Weighted

FEATURES: tuple[type[Feature], ...] = (
    Alternation,  # replaces the step, so it is innermost: what wraps the step stays
    Autocast,
    Weighted,  # replaces the weight of a loss
    Gathering,  # after Weighted: backward passes the gathered rows also where a loss of weight 0 was left out
    LearnedGradients,  # its place is free: both complete other gradients
    BatchTransform,  # after Autocast: transforms in the type of the data
    TrainMetrics,  # order free: reads outputs
    Logged,
    Compiled,  # copies the whole value, logs included
    Scaled,  # replaces the update, so it is inside of what asks about gradients or clips them
    Skipping,  # asks for the norm before clipping, which Clipping has computed by then
    Clipping,
    TaskSteps,  # order free
    Averaging,  # after Skipping: averages the statistics of BatchNorm that a skipped step has restored
    Rates,  # advances the schedule once it is known whether the optimizer has stepped
    EarlyStopping,  # order free: wraps nothing
    TimeLimit,  # the same
)


def find_features(training: TrainContext) -> tuple[Feature, ...]:
    """Return the features that a training has, in their order: those of the section ``features`` come last.

    Raises:
        ExperimentError: a feature can't be built, or is there twice.
    """
    built_in = (kind.of(training) for kind in FEATURES)
    features = [feature for feature in built_in if feature is not None]
    for number, component in enumerate(training.experiment.features):
        key = keys.child("features", number)
        feature = training.create(component, training, key=key)
        if not isinstance(feature, Feature):
            message = f"is a {type(feature).__name__}, not a pipeline.training.feature.Feature; derive it from Feature"
            raise ExperimentError.of(key, message)
        if name_of(feature) in map(name_of, features):
            raise ExperimentError.of(key, f"is a second {name_of(feature)}; list each feature once")
        features.append(feature)
    return tuple(features)
