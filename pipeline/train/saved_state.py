"""The state of a training as a checkpoint has it: taken from a `State`, written, read, and loaded into one.

It is a plain structure of dicts, lists, tuples, numbers, texts and tensors in one file, which torch reads without
executing code. Tensors that ranks hold in shards are in further files, one for each rank: in the structure, a tensor
without memory (on the meta device) stands for each. Whatever was saved by some strategy and number of ranks, any other
can load.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import ExperimentError, PipelineError, TrainingError
from pipeline.protocol.trial import Rank
from pipeline.train.hooks import Hook, name_of
from pipeline.train.names import TASK, shown
from pipeline.train.optim import has_modes, load_named_state, named_state
from pipeline.train.ranks import barrier, call_on_ranks, gather, shard_like
from pipeline.train.schedules import key_of
from pipeline.train.state import Facts, State
from pipeline.train.storage import Entry, Storage, StoredFile, find_damage
from pipeline.wording import listed

STATE = "state.pt"  # File of all that isn't sharded
Saved = dict[str, Any]
"""State by part: "model", the key of an optimizer or scheduler, the path of a hook's class, and others."""
Place = tuple[Any, ...]  # Keys and indices that lead to a tensor in a state


def map_state(value: Any, do: Callable[[Tensor, Place], Any], *, place: Place, key: str = "") -> Any:
    """Return a state with what ``do`` returns for each tensor and its place, and else of plain values."""
    if isinstance(value, Tensor):
        return do(value, place)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | bytes | complex | torch.dtype | torch.device):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        pairs = {
            map_state(name, do, place=(*place, "key"), key=key): map_state(item, do, place=(*place, name), key=key)
            for name, item in value.items()
        }
        return Counter(pairs) if isinstance(value, Counter) else pairs  # MultiStepLR has one
    if isinstance(value, list | tuple):
        items = [map_state(item, do, place=(*place, index), key=key) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise ExperimentError.of(
        key,
        f"its state has a {type(value).__name__} ({_path(place[1:])}), which can't be loaded without executing code. "
        "Return only numbers, strings and tensors from state_dict(), or train without checkpoints (checkpoint.keep: "
        "0).",
    )


def _path(place: Place) -> str:
    return "/".join(map(str, place))


# Taking


class Copy(NamedTuple):
    """The state of a training at a step, on the CPU."""

    state: Saved  # Whole tensors are copied by rank 0 only
    shards: Mapping[str, Tensor]  # This rank's shards by the place of the whole


def check(s: State) -> None:
    """Refuse a part with state that can't be saved."""
    _take_state(s, lambda one, _: one)


def copy_state(s: State) -> Copy:
    """Copy the state to the CPU, where training can't change it. Waits for the device."""
    shards: dict[str, Tensor] = {}

    def copy(one: Tensor, place: Place) -> Tensor:
        is_sharded = hasattr(one, "device_mesh")
        if not (is_sharded or s.rank.is_first):
            return one
        own = one.detach().to("cpu", copy=True)
        if not is_sharded:
            return own if type(own) is Tensor else own.as_subclass(Tensor)  # other classes can't be loaded
        shards[_path(place)] = own
        return torch.empty(one.shape, dtype=one.dtype, device="meta")

    state = {**_take_state(s, copy), "meter": s.meter.state(), "position": None}
    if (position := s.batches.position(s.step) if s.rank.is_first else None) is not None:
        try:
            state["position"] = map_state(position, copy, place=("position",), key="data")
        except ExperimentError:  # a dataset's own state, which isn't plain: the samples are read again
            state["position"] = {**position, "state": [None]}
    return Copy(state, shards)


def _take_state(s: State, do: Callable[[Tensor, Place], Any]) -> Saved:
    weights, names = s.trainee.state_dict(), _names(s)
    metrics = vars(s).get("metrics")  # without building them, which takes seconds
    parts = {
        "model": {name: one for name, one in weights.items() if not name.startswith(TASK)},
        "task": {name: one for name, one in weights.items() if name.startswith(TASK)},
        # A state_dict lacks buffers with ``persistent=False``, which may change in training.
        "buffers": {name: one for name, one in _buffers(s).items() if name not in weights},
        **{key_of("optimizer", name): named_state(one, names) for name, one in s.optimizers.items()},
        **{key_of("scheduler", name): own for name, own in s.schedules.state_dict().items()},
        "scaler": s.scaler.state_dict(),
        **{name_of(hook): hook.state_dict() for hook in s.hooks},
        "metrics": metrics.state_dict() if metrics is not None else {},
        "frozen": [name for name, one in s.trainee.named_parameters() if not one.requires_grad],
        "facts": s.facts,
        "stop_reason": s.stop_reason,
    }
    keys = {"buffers": "model", "task": _task_key(s)}
    return {name: map_state(part, do, place=(name,), key=keys.get(name, name)) for name, part in parts.items()}


def _task_key(s: State) -> str:
    """Return the key of the section that the task comes from."""
    return "loss" if s.experiment.task is None else "task"


def _names(s: State) -> dict[int, str]:
    return {id(one): name for name, one in s.trainee.named_parameters()}


def _buffers(s: State) -> dict[str, Tensor]:
    return dict(s.trainee.named_buffers(remove_duplicate=False))


def describe_other_names(s: State) -> str:
    """Return a warning if the names of ``state_dict()`` differ from the parameters and buffers; else empty."""
    # state_dict() of the model itself: the trainee's calls it for the model, but ignores the result.
    names = {f"model.{name}" for name in s.model.state_dict()}
    names |= {name for name in s.trainee.state_dict() if not name.startswith("model.")}
    saved = {name for name in names if not name.endswith("_extra_state")}
    live = {name for name, _ in s.trainee.named_parameters(remove_duplicate=False)}
    for place, module in s.trainee.named_modules(remove_duplicate=False):
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        live |= {f"{place}.{name}" for name in kept if module._buffers[name] is not None}
    if not (different := sorted(map(shown, saved ^ live))):
        return ""
    return (
        f"state_dict() of the model has other names than its parameters and buffers: {listed(different)}. "
        "Unless its load_state_dict() undoes that, checkpoints can't be loaded. Keep the names, or train without "
        "checkpoints (checkpoint.keep: 0)."
    )


# Files


def write(state: Saved, folder: Path) -> list[StoredFile]:
    """Write what isn't sharded."""
    path = folder / STATE
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return [StoredFile.describe(path)]


def write_shards(shards: Mapping[str, Tensor], folder: Path, *, group: dist.ProcessGroup) -> list[StoredFile]:
    """Write this rank's shards. Collective."""
    # These imports take more than a second, and only sharded strategies need them.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # its files are not pickles
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(
            dict(shards),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=group,
        )
    except CheckpointException as error:  # a BaseException
        raise OSError(str(error)) from error
    return [StoredFile.describe(path) for path in folder.glob(f"shard-{dist.get_rank(group) + 1:05d}-*")]


def read(folder: Path, *, fills: bool) -> Saved:
    """Read the state in a folder; with ``fills``, also what was sharded, as whole tensors."""
    state: Saved = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return _fill_state(state, folder, owners={}) if fills else state


def read_shards(s: State, state: Saved, folder: Path) -> Saved:
    """Return a state of `read` with this rank's shards, sharded like the parameters they belong to. Collective."""
    # By all their names.
    named = [(name, one) for name, one in s.trainee.named_parameters() if hasattr(one, "device_mesh")]
    owners = {own: one.detach() for name, one in named for own in (name, shown(name))}

    def shard(one: Tensor, place: Place) -> Tensor:
        owner = None if hasattr(one, "device_mesh") else _owner(one, place, owners)
        return one if owner is None else shard_like(one, owner)

    sharded: Saved = map_state(_fill_state(state, folder, owners=owners), shard, place=())
    return sharded


def _fill_state(state: Saved, folder: Path, *, owners: Mapping[str, Tensor]) -> Saved:
    """Read what was sharded: sharded like the parameter that it belongs to, if there are ``owners``, else whole."""
    found: dict[str, Tensor] = {}

    def allocate(one: Tensor, place: Place) -> Tensor:
        if not one.is_meta:
            return one
        owner = _owner(one, place, owners)
        empty = torch.empty(one.shape, dtype=one.dtype) if owner is None else torch.empty_like(owner, dtype=one.dtype)
        found[_path(place)] = empty
        return empty

    state = map_state(state, allocate, place=())
    if found:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():  # loading in a single process is intended
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not owners)
    return state


def _owner(one: Tensor, place: Place, owners: Mapping[str, Tensor]) -> Tensor | None:
    """Return the parameter that a tensor belongs to, by its place and shape; None if it belongs to none."""
    return next((owners[name] for name in place if name in owners and owners[name].shape == one.shape), None)


def fetch(s: State, storage: Storage, entry: Entry, *, what: str) -> Saved | str:
    """Read a checkpoint on all ranks; return its damage instead if rank 0 finds it incomplete or damaged. Collective.

    Terabytes may take longer than a collective: the ranks wait for each other without one. ``what`` it is read for.
    """
    if (manifest := entry.manifest) is None:
        return "it has no valid manifest, so it is incomplete or damaged"
    rank, folders, states = s.rank, dict[str, Path](), list[Saved]()
    damage, what = "", f"{s.trial.name}: {what}, {entry.name}"

    def copy() -> None:
        nonlocal damage
        with convert_errors(storage, rank):
            folder = folders[rank.node] = stack.enter_context(storage.fetched(entry.name))
            damage = (find_damage(folder, manifest) or "") if rank.is_first else ""

    def load() -> None:
        with convert_errors(storage, rank):
            states.append(read(folder, fills=not s.is_sharded))

    with ExitStack() as stack:
        # A copy from an object storage is shared by the ranks of a node.
        callers = [number for number, index in enumerate(gather(rank.local_rank, rank=rank)) if index == 0]
        call_on_ranks(copy, callers=callers, what=f"{what} fetched", rank=rank)
        fetched = gather((damage, folders), rank=rank)
        if fetched[0][0]:
            return fetched[0][0]
        by_node = {node: path for _, each in fetched for node, path in each.items()}
        folder = (by_node | folders)[rank.node]
        call_on_ranks(load, callers=range(rank.world_size), what=f"{what} read", rank=rank)
        (state,) = states
        if s.is_sharded:
            state = read_shards(s, state, folder)
        barrier(rank)  # before a copy is removed
    return state


@contextmanager
def convert_errors(storage: Storage, rank: Rank) -> Iterator[None]:
    """Convert the errors of a storage, which may raise anything."""
    try:
        yield
    except PipelineError:
        raise  # already has a message for the user
    except Exception as error:
        shared = f" by rank {rank.rank} on {rank.node}, and all must reach them" if rank.world_size > 1 else ""
        raise TrainingError(
            f"the checkpoints in {storage.address} can't be read{shared}: {type(error).__name__}: {error}. Resume when "
            "the storage is available, or start a new run without --resume."
        ) from error


# Loading


def load_weights(s: State, state: Saved) -> None:
    """Load what a result consists of: weights, buffers, hooks, and optimizers that keep weights of their own."""
    for part, key, module in (("model", "model", s.trainee.model), ("task", _task_key(s), s.trainee.task)):
        own = {name.removeprefix(f"{part}."): value for name, value in state[part].items()}
        _load(key, module.load_state_dict, own)
    _load_buffers(s, state["buffers"])
    s.facts = Facts(*state["facts"]) if state["facts"] is not None else None
    for name, optimizer in s.optimizers.items():
        if has_modes(optimizer):
            load_optimizer(s, name, state)
    for hook in s.hooks:
        name = name_of(hook)
        if name in state:
            _load(name, hook.load_state_dict, state[name])
        elif type(hook).evaluating is not Hook.evaluating:  # early stopping may be new, and begins without memory
            raise ExperimentError.of(name, "is in the experiment, but not in the checkpoint. Remove it.")


def load_rest(s: State, state: Saved, *, reschedules: bool, epoch: int) -> None:
    """Load what a training needs besides its weights, after ``s.step`` steps.

    With ``reschedules``, learning rates are those of the file, as if they had been so from the first step on.
    """
    for name in s.optimizers:
        load_optimizer(s, name, state, keeps_settings=reschedules)
    schedules = {name: state[key] for name in s.optimizers if (key := key_of("scheduler", name)) in state}
    if reschedules:
        s.schedules.restart(schedules, steps=s.step, epochs=epoch)
    else:
        s.schedules.load_state_dict(schedules)
    if state["scaler"]:
        s.scaler.load_state_dict(state["scaler"])
    if state["metrics"] and (metrics := s.metrics) is not None:
        _load("metrics", lambda own: metrics.load_state_dict(own, strict=False), state["metrics"])
    for name, parameter in s.trainee.named_parameters():
        if name in state["frozen"]:
            parameter.requires_grad = False


def load_optimizer(s: State, name: str, state: Saved, *, keeps_settings: bool = False) -> None:
    """Load the state of one optimizer, see `load_named_state`."""
    key = key_of("optimizer", name)
    if key not in state:
        raise ExperimentError.of(key, "is in the experiment, but not in the checkpoint. Restore the experiment.")
    _load(
        key, lambda own: load_named_state(s.optimizers[name], _names(s), own, keeps_settings=keeps_settings), state[key]
    )


def _load(key: str, load: Callable[[Any], object], state: Any) -> None:
    try:
        load(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # what torch raises if it doesn't fit
        raise ExperimentError.of(key, f"doesn't match its state in the checkpoint: {error}") from error


@torch.no_grad()
def _load_buffers(s: State, saved: Mapping[str, Tensor]) -> None:
    """Load buffers; register those that training created or reshaped in a later step."""
    present, modules = _buffers(s), dict(s.trainee.named_modules())
    for name, tensor in saved.items():
        place, _, own = name.rpartition(".")
        if (buffer := present.get(name)) is not None and buffer.shape == tensor.shape:
            buffer.copy_(tensor)
        elif place in modules:  # a changed model may have none of that name
            modules[place].register_buffer(own, tensor.to(s.device, copy=True), persistent=False)
