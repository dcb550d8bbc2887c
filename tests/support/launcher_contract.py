"""What every launcher holds to, old or new: results arrive, a rank's own error is kept, nothing is left behind."""

import re
from collections.abc import Callable
from typing import Any

from pipeline.protocol.events import Failed, Finished, FirstStep, Metrics, ModelSaved, Started, Trained, TrialOpened

Session = Callable[[str], Any]


class LauncherContract:
    """Tests of the launcher that a subclass is parametrized with."""

    def test_a_trial_returns_its_result(self, launched: Session, launcher: str) -> None:
        session = launched(launcher)
        *_, finished = session.events["fp64"]

        assert session.outcomes["fp64"].finished == finished
        assert not session.outcomes["fp64"].has_failed
        assert isinstance(finished, Finished)
        assert finished.result.steps == 46
        assert finished.result.samples_per_second.median > 0
        assert finished.time_to_first_step_s is not None
        assert 0 < finished.result.metrics["validation/accuracy"] <= 1

    def test_events_arrive_in_the_order_in_which_they_were_sent(self, launched: Session, launcher: str) -> None:
        beside = ("system_metrics", "warned")
        events = [event for event in launched(launcher).events["fp64"] if event.kind not in beside]
        kinds = [type(event) for event in events]
        steps = [event.step for event in events if isinstance(event, Metrics)]

        assert kinds[:3] == [TrialOpened, Started, FirstStep]
        assert kinds[-3:] == [ModelSaved, Trained, Finished]
        assert kinds.count(Finished) == 1
        assert steps == sorted(steps)

    def test_each_step_is_reported_once(self, launched: Session, launcher: str) -> None:
        events = launched(launcher).events["fp64"]
        points = [point for event in events if isinstance(event, Metrics) for point in event.points]

        assert [point.step for point in points if point.name == "train/loss"] == list(range(1, 47))

    def test_files_arrive_in_the_run_folder(self, launched: Session, launcher: str) -> None:
        session = launched(launcher)
        saved = next(event for event in session.events["fp64"] if isinstance(event, ModelSaved))

        assert (session.folder / saved.weights).stat().st_size > 0
        assert (session.folder / saved.example).stat().st_size > 0

    def test_a_user_exception_keeps_its_own_traceback(self, launched: Session, launcher: str) -> None:
        session = launched(launcher)
        failures = [event for event in session.events["raises"] if isinstance(event, Failed)]
        own = [failure for failure in failures if "the model's own mistake" in failure.error]

        assert len(own) == 1
        assert own[0].error == "ZeroDivisionError: the model's own mistake"
        assert re.search(r'project/lab\.py", line \d+, in _fail', own[0].traceback)
        assert own[0].traceback.count("Traceback (most recent call last)") == 1
        assert not [event for event in session.events["raises"] if isinstance(event, Finished)]

    def test_the_rank_that_failed_is_to_blame(self, launched: Session, launcher: str) -> None:
        outcome = launched(launcher).outcomes["raises"]

        assert str(outcome.error).endswith("ZeroDivisionError: the model's own mistake")
        assert not outcome.has_only_lost_workers
        assert not outcome.has_ended

    def test_everything_is_as_before(self, launched: Session, launcher: str) -> None:
        """Processes, environment, threads, signal handlers, process group."""
        assert launched(launcher).leaks == []
