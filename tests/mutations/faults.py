"""Deliberate faults, each of which breaks a promise: what `make test-mutation` puts in, one at a time.

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


FAULTS = (
    Fault(
        "the sampler forgets the epoch",
        "each epoch has an order of its own",
        "pipeline/train/order.py",
        'mix(self.seed, "order", epoch)',
        'mix(self.seed, "order", 0)',
        ("tests/unit/test_order.py",),
    ),
    Fault(
        "an uneven share has the weight of an even one",
        "the same losses at any number of workers, uneven batches too",
        "pipeline/train/order.py",
        "share, size = batch[rank::world_size], len(batch)",
        "share, size = batch[rank::world_size], self.global_batch_size",
        ("tests/unit/test_order.py", "tests/unit/test_feature_pairs.py"),
    ),
    Fault(
        "a rank validates on the samples of the others",
        "each validation sample counts once",
        "pipeline/train/order.py",
        "np.array_split(batch, world_size)[rank].tolist()",
        "batch[rank:].tolist()",
        ("tests/unit/test_order.py",),
    ),
    Fault(
        "the draws of a step depend on the steps before",
        "a resumed training drops out what an undisturbed one does",
        "pipeline/train/trainer.py",
        "        seed_all(seed, s.device, others=facts is None or facts.draws_others)",
        "        pass",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "gradients are clipped before they are unscaled",
        "fp16 clips what fp32 clips",
        "pipeline/train/trainer.py",
        "        s.scaler.unscale_(optimizer)\n",
        "        pass\n",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "targets that are ignored count as samples",
        "padding changes no objective, at any number of workers",
        "pipeline/tasks/supervised.py",
        "        return counted.sum() if weight is None",
        "        return torch.ones_like(targets).sum() if weight is None",
        ("tests/system/contract/test_by_hand.py",),
    ),
    Fault(
        "each rank divides by its own items",
        "a loss over items is the same at any number of workers",
        "pipeline/train/trainer.py",
        "if exchange and s.rank.world_size > 1:  # while the gradients are computed",
        "if False:",
        ("tests/system/contract/test_by_hand.py",),
    ),
    Fault(
        "a hook's state is not restored",
        "resuming is exact, averages and early stopping too",
        "pipeline/train/saved_state.py",
        "            _load(name, hook.load_state_dict, state[name])",
        "            pass",
        ("tests/unit/test_hooks.py",),
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
        "a loss that is not finite goes unnoticed",
        "a NaN stops all ranks and names the step",
        "pipeline/train/nonfinite.py",
        "            if not (math.isfinite(loss) and math.isfinite(norm)):",
        "            if not (loss == loss or math.isfinite(norm) or norm == 0):",
        ("tests/unit/test_training.py",),
    ),
    Fault(
        "gradients are averaged twice",
        "two ranks train what one trains",
        "pipeline/strategies/ddp.py",
        "        return float(self.world_size)",
        "        return 1.0",
        ("tests/system/contract/test_strategies.py",),
    ),
    Fault(
        "the optimizer's memory is not restored",
        "resuming is exact, momentum too",
        "pipeline/train/optim.py",
        '    for name, values in saved["state"].items():',
        "    for name, values in dict[str, Any]().items():",
        ("tests/unit/test_resuming.py",),
    ),
    Fault(
        "a checkpoint is written without fsync",
        "a checkpoint that counts as whole survives a power failure",
        "pipeline/train/saved_state.py",
        "        os.fsync(file.fileno())",
        "        os.fstat(file.fileno())",
        ("tests/unit/test_checkpoint.py",),
    ),
    Fault(
        "a manifest is written in its place, without rename",
        "half a checkpoint is never taken for a whole one",
        "pipeline/train/storage.py",
        '        partial = path.with_name(f".{path.name}.partial")\n',
        "        partial = path\n",
        ("tests/unit/test_checkpoint.py",),
    ),
    Fault(
        "a checksum is not looked at",
        "a damaged checkpoint is not gone on from",
        "pipeline/train/manifest.py",
        "        if _sha256(path) != file.sha256:",
        "        if not _sha256(path):",
        ("tests/unit/test_checkpoint.py",),
    ),
    Fault(
        "steps that are done again are recorded again",
        "no point of a resumed run is there twice",
        "pipeline/record/recorder.py",
        "point.step > self._steps.get(series,",
        "point.step >= self._steps.get(series,",
        ("tests/unit/test_recorder.py",),
    ),
    Fault(
        "the MLflow writer blocks the step",
        "tracking can't hurt training",
        "pipeline/tracking/follower.py",
        "        if isinstance(event, RunClosed):",
        "        self._done.wait(0.2)\n        if isinstance(event, RunClosed):",
        ("tests/system/replay/test_writer.py",),
    ),
    Fault(
        "a killed run is FINISHED in MLflow",
        "a killed driver's run ends as KILLED",
        "pipeline/record/folder.py",
        '    return RunClosed(time=at, status="KILLED",',
        '    return RunClosed(time=at, status="FINISHED",',
        (
            "tests/system/replay/test_sent.py::test_a_killed_run_ends_with_its_last_event_and_goes_on_when_it_is_resumed",
        ),
    ),
    Fault(
        "a torn line stays in the journal",
        "a killed driver loses at most its last event",
        "pipeline/record/journal.py",
        "        os.truncate(path, start)",
        "        os.truncate(path, path.stat().st_size)",
        ("tests/unit/test_journal.py",),
    ),
    Fault(
        "the interval takes rounds for independent",
        "the interval of a speedup holds the truth as often as it says",
        "pipeline/protocol/estimates.py",
        "math.sqrt((1 + r) / (1 - r))",
        "1",
        ("tests/unit/test_estimates.py",),
    ),
    Fault(
        "measuring the speedup trains on",
        "the training's results are the same with and without a baseline",
        "pipeline/train/turns.py",
        "        kept.enter_context(suspend_updates(s))\n",
        "        del kept\n",
        ("tests/unit/test_turns.py",),
    ),
    Fault(
        "a failed training ends with exit code 0",
        "exit codes tell how a command ended",
        "pipeline/commands/options.py",
        "            raise typer.Exit(error.exit_code) from None",
        "            raise typer.Exit(0) from None",
        ("tests/system/replay/test_played.py::test_a_failed_rank_is_named_with_its_own_traceback",),
    ),
    Fault(
        "a password is written down",
        "credentials are in no file of a run",
        "pipeline/experiment/uris.py",
        'address, mark, query = _CREDENTIALS.sub(r"\\1", uri).partition("?")',
        'address, mark, query = uri.partition("?")',
        ("tests/unit/test_checkpoint.py::TestStorage::test_with_a_password_is_refused_and_not_repeated",),
    ),
    Fault(
        "loaders are left to the garbage collector",
        "loader processes end with their trial",
        "pipeline/train/loader.py",
        "            loader.close()\n",
        "            pass\n",
        ("tests/system/contract/test_loader_processes.py",),
    ),
)
