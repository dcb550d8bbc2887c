"""``pipeline sweep FILE --confirm N``: the best two trials again with new seeds, since the best was partly lucky."""

from pipeline.commands.compare.compared_runs import Question
from pipeline.commands.compare.study import study
from pipeline.commands.compare.study_plan import make_study
from pipeline.config.load import ExperimentFile
from pipeline.errors import TrainingError
from pipeline.recording.terminal.terminal import Terminal, write
from pipeline.report.compared import Compared
from pipeline.report.swept import Swept, assigned


def confirm_best(file: ExperimentFile, swept: Swept, *, pairs: int, verbose: bool, terminal: Terminal) -> Compared:
    """Train pairs of the second best and the best trial of a sweep, and return which of them is better.

    Raises:
        PipelineError: ready to be shown; TrainingError if the sweep has less than two trials that finished.
    """
    best = [trial for trial in swept.by_merit if trial.state == "finished" and trial.value is not None][:2]
    if len(best) < 2:
        raise TrainingError("--confirm compares the best two trials, and fewer than two completed")
    seed = file.experiment.seed + 1  # that of the sweep has had its luck
    variants = [
        (f"trial {trial.number}: {assigned(trial.values)}", file.varied({**trial.values, "seed": seed}))
        for trial in reversed(best)
    ]
    write(terminal.progress, f"comparing trials {best[1].number} (A) and {best[0].number} (B) with new seeds")
    plan = make_study(variants, Question(metric=swept.metric, mode=swept.mode), pairs=pairs, is_timed=False)
    found: list[Compared] = []
    study(plan, (pairs,), resume=None, verbose=verbose, terminal=terminal, show=found.append)
    return found[-1]
