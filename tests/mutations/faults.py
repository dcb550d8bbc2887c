"""Deliberate faults, each of which breaks a promise: what `make test-the-tests` puts in, one at a time.

``old`` must stand in the file exactly once. One that no longer does is an error: look what the promise is held by
today, and break that.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault."""

    name: str
    promise: str
    """What it breaks."""
    file: str
    old: str
    new: str
    first: tuple[str, ...]
    """Tests that most likely notice it: files, or files and a name."""
    excused: str = ""
    """Why no test of `make test` can notice it."""


FAULTS = (
    Fault(
        "the sampler forgets the epoch",
        "each epoch has an order of its own",
        "pipeline/training/order.py",
        'mix(self.seed, "order", epoch)',
        'mix(self.seed, "order", 0)',
        ("tests/unit/test_order.py",),
    ),
    Fault(
        "an uneven share has the weight of an even one",
        "the same losses at any number of workers, uneven batches too",
        "pipeline/training/order.py",
        "weight=len(part) / len(batch), is_last",
        "weight=1 / (world_size * len(parts)), is_last",
        ("tests/unit/test_order.py",),
    ),
    Fault(
        "a rank validates on the samples of the others",
        "each validation sample counts once",
        "pipeline/training/order.py",
        "torch.split(torch.arange(samples)[rank::world_size], batch_size)",
        "torch.split(torch.arange(samples)[rank:], batch_size)",
        ("tests/unit/test_order.py",),
    ),
    Fault(
        "the draws of a step depend on the steps before",
        "a resumed training drops out what an undisturbed one does",
        "pipeline/training/step_guard.py",
        'seed_all(mix(context.experiment.seed, "step", self._step, context.rank.rank), device=context.device)',
        "pass",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "gradients are clipped before they are unscaled",
        "fp16 clips what fp32 clips",
        "pipeline/training/step.py",
        "    context.scaler.unscale_(context.optimizer)\n    norm",
        "    norm",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "targets that are ignored count as samples",
        "padding changes no objective, at any number of workers",
        "pipeline/tasks.py",
        "            return (targets != entropy.ignore_index).sum()",
        "            return torch.ones_like(targets).sum()",
        ("tests/contract/test_weights.py",),
    ),
    Fault(
        "the traceback is that of whoever spoke first",
        "the first failing rank's own traceback",
        "pipeline/protocol/trial_outcome.py",
        '        first = next((failure for failure in self.failures if failure.origin == "rank"), None)',
        "        first = next(iter(self.failures), None)",
        ("tests/unit/test_trial_outcome.py",),
    ),
    Fault(
        "all micro-batches count as the last one",
        "gradient accumulation trains the same",
        "pipeline/training/step.py",
        "        if micro_batch.is_last:\n            break",
        "        if True:\n            break",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "a loss that is not finite goes unnoticed",
        "a NaN stops all ranks and names the step",
        "pipeline/training/nonfinite.py",
        "            if not (math.isfinite(loss) and math.isfinite(norm)) and",
        "            if not (loss == loss or math.isfinite(norm) or norm == 0) and",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "a skipped step leaves its batch statistics behind",
        "a step that is skipped leaves no trace",
        "pipeline/training/step_guard.py",
        "            buffer.copy_(before)",
        "            del buffer, before",
        ("tests/unit/test_skipped_steps.py",),
    ),
    Fault(
        "evaluation drops out",
        "evaluation neither trains nor drops out",
        "pipeline/training/evaluation.py",
        "        module.eval()\n",
        "        module.train()\n",
        ("tests/unit/test_evaluation.py",),
    ),
    Fault(
        "metrics go on counting from epoch to epoch",
        "a metric is that of the validation set, each time",
        "pipeline/training/evaluation.py",
        "        collection.reset()\n",
        "",
        ("tests/unit/test_evaluation.py",),
    ),
    Fault(
        "gradients are averaged twice",
        "two ranks train what one trains",
        "pipeline/strategies/ddp.py",
        "        return float(self.world_size)",
        "        return 1.0",
        ("tests/contract/test_strategies.py",),
    ),
    Fault(
        "warm-up is over at once",
        "train.lr_scaling warms up",
        "pipeline/training/learning_rate.py",
        "    if step >= scaling.warmup_steps:",
        "    if step >= 0:",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "the scheduler is not restored",
        "resuming is exact, its schedule too",
        "pipeline/training/checkpoints/state.py",
        '        _load("scheduler", context.scheduler, parts["scheduler"])',
        "        pass",
        ("tests/unit/test_resuming.py", "tests/replay/test_earlier.py"),
    ),
    Fault(
        "the optimizer's memory is not restored",
        "resuming is exact, momentum too",
        "pipeline/training/checkpoints/state.py",
        '    _load("optimizer", context.optimizer, _numbered(context, parts["optimizer"]))\n',
        '    _numbered(context, parts["optimizer"])\n',
        ("tests/unit/test_resuming.py", "tests/replay/test_earlier.py"),
    ),
    Fault(
        "a resumed training does its last step again",
        "resuming is exact to the step",
        "pipeline/training/loop.py",
        "    begin = max(first, start)",
        "    begin = max(first, start - 1)",
        ("tests/unit/test_resuming.py", "tests/replay/test_earlier.py"),
    ),
    Fault(
        "a checkpoint is written without fsync",
        "a checkpoint that counts as whole survives a power failure",
        "pipeline/training/checkpoints/files.py",
        "        os.fsync(file.fileno())",
        "        os.fstat(file.fileno())",
        ("tests/unit/test_durable_checkpoints.py",),
    ),
    Fault(
        "a manifest is written in its place, without rename",
        "half a checkpoint is never taken for a whole one",
        "pipeline/training/checkpoints/storage.py",
        '        partial = path.with_name(f".{path.name}.partial")\n',
        "        partial = path\n",
        ("tests/unit/test_durable_checkpoints.py",),
    ),
    Fault(
        "a checksum is not looked at",
        "a damaged checkpoint is not gone on from",
        "pipeline/training/checkpoints/manifest.py",
        "            if sha256(content) != file.sha256:",
        "            if not sha256(content):",
        ("tests/unit/test_checkpoint.py",),
    ),
    Fault(
        "the oldest checkpoints are kept",
        "checkpoint.keep keeps the newest",
        "pipeline/training/checkpoints/manifest.py",
        "key=lambda one: one.step, reverse=True)",
        "key=lambda one: one.step)",
        ("tests/unit/test_checkpoint.py",),
    ),
    Fault(
        "an event is delivered twice",
        "no point is there twice",
        "pipeline/recording/recorder.py",
        "                subscriber.receive(new)",
        "                subscriber.receive(new)\n                subscriber.receive(new)",
        ("tests/unit/test_recorder.py",),
    ),
    Fault(
        "steps that are done again are recorded again",
        "no point of a resumed run is there twice",
        "pipeline/recording/recorder.py",
        "point.step > known[series]:",
        "point.step >= known[series]:",
        ("tests/unit/test_recorder.py",),
    ),
    Fault(
        "the MLflow writer blocks the step",
        "tracking can't hurt training",
        "pipeline/recording/mlflow.py",
        "        if isinstance(event, RunClosed):",
        "        self._done.wait(0.2)\n        if isinstance(event, RunClosed):",
        ("tests/replay/test_writer.py",),
    ),
    Fault(
        "a point has the time at which it is sent",
        "pipeline sync adds nothing twice",
        "pipeline/recording/mlflow_entities.py",
        "    return round(event.time * 1000)",
        "    import time\n\n    return round(time.time() * 1000)",
        ("tests/replay/test_sent.py",),
    ),
    Fault(
        "a killed run is FINISHED in MLflow",
        "a killed driver's run ends as KILLED",
        "pipeline/recording/sync.py",
        '        yield RunClosed(time=last.time, status="KILLED",',
        '        yield RunClosed(time=last.time, status="FINISHED",',
        ("tests/replay/test_sent.py::test_a_killed_run_ends_with_its_last_event_and_goes_on_when_it_is_resumed",),
    ),
    Fault(
        "a torn line stays in the journal",
        "a killed driver loses at most its last event",
        "pipeline/recording/journal.py",
        "        os.truncate(path, start)",
        "        os.truncate(path, path.stat().st_size)",
        ("tests/unit/test_journal.py",),
    ),
    Fault(
        "baseline and main are swapped in the speedup",
        "speedup is the training's throughput over the baseline's",
        "pipeline/report/report.py",
        "*(row.against(rows[0]) for row in rows[1:])",
        "*(row.model_copy(update=rows[0].against(row).model_dump(include={'speedup', 'speedup_low', 'speedup_high'}))"
        " for row in rows[1:])",
        ("tests/unit/test_report.py",),
    ),
    Fault(
        "efficiency forgets the devices",
        "efficiency is speedup over the ratio of devices",
        "pipeline/report/__init__.py",
        "ratios.median / (self.replicas / baseline.replicas)",
        "ratios.median",
        ("tests/unit/test_report.py",),
    ),
    Fault(
        "a failed training ends with exit code 0",
        "exit codes tell how a command ended",
        "pipeline/cli/arguments.py",
        "            raise typer.Exit(error.exit_code) from None",
        "            raise typer.Exit(0) from None",
        ("tests/replay/test_played.py::test_a_failed_rank_is_named_with_its_own_traceback",),
    ),
    Fault(
        "a failed run is FINISHED",
        "a run's status is what became of it",
        "pipeline/recording/recorded_run.py",
        '    return "FAILED", str(error) if',
        '    return "FINISHED", str(error) if',
        ("tests/replay/test_played.py::test_a_failed_rank_is_named_with_its_own_traceback",),
    ),
    Fault(
        "progress stands in the JSON document",
        "--json prints one document and nothing else",
        "pipeline/recording/terminal.py",
        "        stdout = stderr if as_json else",
        "        stdout = stderr if as_json and quiet else",
        ("tests/replay/test_played.py::test_scripts_get_one_document_and_nothing_else",),
    ),
    Fault(
        "a YAML problem is swallowed",
        "all problems of a file at once",
        "pipeline/config/load.py",
        "        raise _explain([*problems, *rejected], places)",
        "        raise _explain([*problems, *rejected][:1], places)",
        ("tests/unit/test_load.py",),
    ),
    Fault(
        "a target's home is not looked at",
        "a file runs code of allowed packages only",
        "pipeline/config/targets.py",
        "            self._refuse_module(found)\n",
        "",
        ("tests/unit/test_components.py",),
    ),
    Fault(
        "a password is written down",
        "credentials are in no file of a run",
        "pipeline/config/uris.py",
        '    elif "@" not in parts.netloc:\n        return uri\n',
        "    else:\n        return uri\n",
        ("tests/unit/test_checkpoint.py::TestStorage::test_with_a_password_is_refused_and_not_repeated",),
    ),
    Fault(
        "whoever calls may talk to the driver",
        "workers show a key before the driver listens",
        "pipeline/protocol/channel/inbox.py",
        "        return False\n    return True",
        "        return True\n    return True",
        ("tests/unit/test_channel.py",),
    ),
    Fault(
        "the worst trial of a sweep is the best",
        "a sweep names its best trial",
        "pipeline/commands/sweep/sweep_report.py",
        '    pick = min if direction == "min" else max',
        '    pick = max if direction == "min" else min',
        ("tests/unit/test_best_trial.py",),
    ),
)
