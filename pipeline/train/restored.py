"""The weights of a trained model, restored without training: to evaluate them, or to take them out of the project."""

import math
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeline.errors import ExperimentError, PipelineError, TrainingError, UsageError
from pipeline.experiment.schema import Experiment
from pipeline.protocol.events import EXAMPLE, WEIGHTS, Evaluated, Outbox
from pipeline.protocol.trial import Evaluation, Rank, Split
from pipeline.train.build import NOBODY, build
from pipeline.train.checkpoint import check_data
from pipeline.train.evaluate import evaluate, full_state_dict, prepare, resulting_weights, send_curve
from pipeline.train.exported import Example, trained_model, write_onnx, write_program
from pipeline.train.ranks import broadcast_from_first
from pipeline.train.reference import Reference
from pipeline.train.report import example_of
from pipeline.train.saved_state import fetch, load_weights
from pipeline.train.state import State
from pipeline.train.storage import Manifest, Storage, entry_of
from pipeline.wording import first_line

WEIGHTS_FILE, PROGRAM, ONNX = FILES = ("model.safetensors", "model.pt2", "model.onnx")


def restore(trial: Evaluation, *, rank: Rank, outbox: Outbox = NOBODY) -> tuple[State, Manifest]:
    """Build a rank's part of a trial with the weights of its checkpoint. Collective."""
    s, storage = build(trial, rank=rank, outbox=outbox), Storage(trial.checkpoints)

    entry = broadcast_from_first(lambda: entry_of(storage, trial.step), rank=rank)
    state = fetch(s, storage, entry, what="restored")
    if entry.manifest is None or isinstance(state, str):
        place = storage.place(entry.name)
        raise TrainingError(f"{place} can't be used: {state}; set --checkpoint to another step")
    load_weights(s, state)
    s.begin_step(entry.manifest.step - 1)  # as when the training evaluated this step
    return s, entry.manifest


def evaluate_checkpoint(trial: Evaluation, *, rank: Rank, outbox: Outbox) -> Evaluated:
    """Evaluate the weights of the trial's checkpoint. Collective; all ranks return the same values."""
    s, manifest = restore(trial, rank=rank, outbox=outbox)
    splits: tuple[Split, ...] = ("test", "validation") if trial.split is None else (trial.split,)
    split = next(filter(s.batches.has, splits), None)
    if split is None:
        others: tuple[Split, ...] = ("validation", "test")
        there = next((f"; use --split {other}" for other in others if s.batches.has(other)), "")
        what = trial.split or "test or validation"
        raise ExperimentError.of("data", f"there is no {what} set to evaluate{there}")
    prepare(s)
    changed = check_data(s, manifest)
    values = evaluate(s, split=split, show=lambda name, curve: send_curve(s, f"{split} {name}", curve))
    return Evaluated(
        trial=trial.name,
        split=split,
        samples=s.batches.size(split),
        step=manifest.step,
        epoch=epoch_of(manifest),
        best=trial.best,
        checkpoint=Storage(trial.checkpoints).place(manifest.name),
        values=values,
        changes=(*trial.changes, *([f"data: {changed}"] if changed else [])),
    )


def epoch_of(manifest: Manifest) -> int:
    """Return the epoch of a checkpoint's step, counted from 1."""
    return math.ceil(manifest.step / manifest.steps_per_epoch)


class PortableModel(NamedTuple):
    """Weights of a training, and what is needed to build the model around them."""

    experiment: Experiment
    allowed: tuple[str, ...]
    weights: Mapping[str, Tensor]
    example: Example | None  # Inputs of two samples; None if they are no tensors
    reference: Reference  # Outputs of the evaluated model
    runtime: Mapping[str, int]  # Values of ``${total_steps}`` and the like, by name
    epoch: int  # Epoch of the weights, counted from 1
    data_change: str = ""
    """Change of the data since the weights' checkpoint was saved; empty if it has not, or was not read."""

    def module(self) -> nn.Module:
        """Build the model on the CPU, in evaluation mode."""
        try:
            return trained_model(self.experiment, self.weights, allowed=self.allowed, reference=self.reference)
        except RuntimeError as error:
            said = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the weights don't match {self.experiment.model.target}: {said}. Use the code of the training run."
            ) from error


def of_checkpoint(trial: Evaluation) -> PortableModel:
    """Read the weights of a checkpoint in this process, and example inputs from the experiment's data."""
    try:
        s, manifest = restore(trial, rank=Rank())
        changed = check_data(s, manifest)
        with resulting_weights(s):
            weights = tree_map_only(Tensor, lambda own: own.detach().to("cpu", copy=True), dict(full_state_dict(s)))
            example, reference = example_of(s)
    except PipelineError:
        raise
    except Exception as error:  # user code may raise anything
        raise TrainingError(f"{type(error).__name__}: {error}", traceback.format_exc()) from error
    known = {**s.batches.runtime, "world_size": manifest.world_size}
    reference = reference._replace(runtime=known)
    return PortableModel(
        trial.experiment, trial.allowed, weights, example, reference, known, epoch_of(manifest), changed
    )


def of_result(
    folder: Path, experiment: Experiment, *, allowed: tuple[str, ...], runtime: Mapping[str, int], epoch: int
) -> PortableModel:
    """Read the weights that a training left in its run's folder, and the example inputs with them, if any."""
    weights, example = folder / WEIGHTS, folder / EXAMPLE
    try:
        tensors: Mapping[str, Tensor] = torch.load(weights, map_location="cpu", weights_only=True)
        inputs = torch.load(example, map_location="cpu", weights_only=True) if example.exists() else None
        reference = Reference.load(folder)
    except Exception as error:  # whatever torch raises for a damaged file
        raise UsageError(f"{weights} can't be read: {first_line(error)}; use --checkpoint last") from error
    return PortableModel(experiment, allowed, tensors, inputs, reference, runtime, epoch)


def write_model(model: PortableModel, folder: Path, *, onnx: bool) -> str:
    """Write the weights, the program if the model can be traced, and ONNX if it is asked for."""
    module = model.module()
    tensors = {name: one for name, one in module.state_dict().items() if isinstance(one, Tensor)}  # not extra state
    # Copies, since safetensors refuses tensors that share memory, such as tied weights.
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    example = model.example
    if example is None:
        untraced = "the model's inputs are not only tensors"
    else:
        untraced = _trace(model, partial(write_program, module, example, folder / PROGRAM))
    if onnx:
        if isinstance(example, Tensor):
            refused = _trace(model, partial(write_onnx, module, example, folder / ONNX))
        else:
            refused = "the model has named inputs" if example is not None else untraced
        if refused:
            raise UsageError(f"--onnx: {refused}. Leave out --onnx.")
    return untraced


def _trace(model: PortableModel, write: Callable[[], None]) -> str:
    """Write a file for which torch traces the model; return the reason if torch can't trace it."""
    try:
        write()
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever torch can't trace in a user's model
        return f"torch can't trace {model.experiment.model.target}: {first_line(error)}"
    return ""
