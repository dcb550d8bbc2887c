"""``pipeline sweep FILE --confirm N``: the best two trials again with new seeds, since the best was partly lucky."""

import shlex

from pipeline.commands.compare.compared_runs import Question
from pipeline.commands.compare.study import study
from pipeline.commands.compare.study_plan import make_study
from pipeline.config.load import ExperimentFile
from pipeline.config.overrides import override
from pipeline.config.uris import without_credentials_in
from pipeline.config.variant_files import read_variants
from pipeline.errors import TrainingError
from pipeline.recording.terminal.terminal import Terminal, write
from pipeline.report.compared import Compared
from pipeline.report.swept import Swept

_SEED = "seed"


def confirm_best(file: ExperimentFile, swept: Swept, *, pairs: int, verbose: bool, terminal: Terminal) -> Compared:
    """Train pairs of the second best and the best trial of a sweep, and return which of them is better.

    It is the study of a ``pipeline compare`` command, which is printed, and which continues it.

    Raises:
        PipelineError: ready to be shown; TrainingError if there are no two trials that finished with other settings.
    """
    ended = [trial for trial in swept.by_merit if trial.state == "finished" and trial.value is not None]
    settings = [{key: value for key, value in trial.values.items() if key != _SEED} for trial in ended]
    other = next((index for index, values in enumerate(settings) if values != settings[0]), None)
    if other is None:
        raise TrainingError("--confirm compares the best two settings, and no two trials with other settings completed")
    keys = [key for key in settings[0] if settings[0][key] != settings[other][key]]
    shared = [override(key, value) for key, value in settings[0].items() if key not in keys]
    given = [word for word in file.overrides if not word.startswith(("sweep.", "sweep=", f"{_SEED}="))]
    overrides = [*given, *shared, f"{_SEED}={file.experiment.seed + 1}"]  # the seed of the sweep has had its luck
    vary = " ".join(
        shlex.quote(f"{override(key, settings[other][key])},{_value(key, settings[0][key])}") for key in keys
    )
    shown = [str(file.path), *map(without_credentials_in, overrides), "--vary", vary, "--seeds", str(pairs)]
    shown += ["--metric", swept.metric, *(["--mode", swept.mode] if swept.mode else [])]
    command = shlex.join(["pipeline", "compare", *shown])
    write(terminal.progress, f"trial {ended[other].number} is A, trial {ended[0].number} is B: {command}")
    question = Question(metric=swept.metric, mode=swept.mode)
    plan = make_study(read_variants([str(file.path)], overrides, vary=vary), question, pairs=pairs, is_timed=False)
    found: list[Compared] = []
    study(plan, (pairs,), resume=None, verbose=verbose, terminal=terminal, show=found.append, command=command)
    return found[-1]


def _value(key: str, value: object) -> str:
    return override(key, value).removeprefix(f"{key}=")
