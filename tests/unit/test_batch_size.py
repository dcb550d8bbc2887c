"""Finding a batch size: which sizes are tried, how one is tried on a real model, and what to write in the file."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import toys
from samples import in_turn
from torch import Tensor, nn

from pipeline.errors import ExperimentError
from pipeline.protocol.estimates import spread
from pipeline.protocol.events import BatchSizesFound, Failed
from pipeline.protocol.trial import Rank, Tuning
from pipeline.protocol.trial_result import BatchCandidate, BatchSizes, Spread
from pipeline.report.tuned import BatchAdvice, Tuned, TunedReport, advise_batch
from pipeline.training import bench
from pipeline.training.batch_size import CLOSE, Search, find, outcome
from pipeline.training.bench import TrialBench
from pipeline.training.build import build
from pipeline.training.context import TrainContext
from pipeline.training.torch_errors import is_out_of_memory
from pipeline.worker import main
from pipeline.worker.process_group import process_group

REFUSED_BYTES = 2**60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which sizes are tried is the subject, not how fast they are."""
    monkeypatch.setattr(bench, "_WINDOW_SECONDS", 0.01)


class Paper:
    """A bench that holds as many samples as its smallest rank, with a given throughput."""

    def __init__(self, *capacities: int, rate: Callable[[int], float] = float) -> None:
        self.capacities = capacities
        self.curve = rate
        self.measured: list[int] = []

    def fits(self, batch_size: int) -> bool:
        return all(batch_size <= capacity for capacity in self.capacities)

    def rate(self, batch_size: int) -> float:
        assert self.fits(batch_size)
        self.measured.append(batch_size)
        return self.curve(batch_size)

    def peak_memory_mb(self) -> tuple[float, ...]:
        return tuple(10.0 * self.measured[-1] for _ in self.capacities)


def searched(
    paper: Paper, *, smallest: int = 1, most: int = 10_000, until_flat: bool = False, also: int = 1
) -> BatchSizes:
    search = Search(paper, smallest=smallest, most=most, until_flat=until_flat)
    return outcome(search.run(also=also), train_samples=most)


def tried(sizes: BatchSizes) -> list[int]:
    return [one.batch_size for one in sizes.candidates]


# Which sizes are tried


def test_sizes_double_up_to_the_most() -> None:
    sizes = searched(Paper(10**6), most=100)
    assert tried(sizes) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert all(one.fits for one in sizes.candidates)
    assert sizes.largest_that_fits is None  # memory never ran out


@pytest.mark.parametrize("capacity", [*range(1, 70), 100, 127, 128, 1000, 1023])
def test_the_largest_that_fits_is_closed_in_on(capacity: int) -> None:
    sizes = searched(Paper(capacity))
    power = 2 ** (capacity.bit_length() - 1)

    assert sizes.largest_that_fits is not None
    assert sizes.largest_that_fits <= capacity < sizes.largest_that_fits + max(1, power // 8)
    for one in sizes.candidates:
        assert one.fits == (one.batch_size <= capacity)
        assert (one.samples_per_second is not None) == bool(one.peak_memory_mb) == one.fits
    assert tried(sizes) == sorted(set(tried(sizes)))


@pytest.mark.parametrize("most", [5, 97, 100, 127])
def test_a_most_that_does_not_fit_is_bisected_too(most: int) -> None:
    sizes = searched(Paper(most - 1), most=most)
    assert sizes.largest_that_fits is not None
    assert most - max(1, most // 8) <= sizes.largest_that_fits < most


def test_a_size_fits_only_if_it_fits_on_all_ranks() -> None:
    assert searched(Paper(64, 5, 1000)).largest_that_fits == 5


@pytest.mark.parametrize("smallest", [1, 2])
def test_nothing_fits(smallest: int) -> None:
    sizes = searched(Paper(0), smallest=smallest)
    assert tried(sizes) == [smallest]
    assert (sizes.largest_that_fits, sizes.recommended) == (0, None)


def saturating(size: int) -> float:
    return float(min(size, 16))


def test_on_cpu_two_doublings_without_gain_are_enough() -> None:
    assert tried(searched(Paper(10**6, rate=saturating), until_flat=True)) == [1, 2, 4, 8, 16, 32, 64]
    assert tried(searched(Paper(10**6, rate=saturating), most=128)) == [1, 2, 4, 8, 16, 32, 64, 128]


def test_one_doubling_without_gain_may_be_noise() -> None:
    bumpy = Paper(10**6, rate=lambda size: 2.0 if size == 4 else float(size))
    assert tried(searched(bumpy, most=16, until_flat=True)) == [1, 2, 4, 8, 16]


def test_the_declared_size_is_measured_too_if_it_is_known_to_fit() -> None:
    assert 12 in tried(searched(Paper(40), also=12))
    assert 39 not in tried(searched(Paper(33), also=39))
    assert tried(searched(Paper(10**6), most=4, also=3)) == [1, 2, 3, 4]
    assert tried(searched(Paper(10**6), smallest=2, most=4, also=1)) == [2, 4]  # batch norm


def test_the_smallest_close_to_the_best_is_recommended() -> None:
    assert searched(Paper(10**6, rate=saturating), most=128).recommended == 16
    assert searched(Paper(10**6, rate=lambda size: 100 + (size > 1) / CLOSE), most=4).recommended == 1
    assert searched(Paper(10**6, rate=lambda size: 100 / size), most=64).recommended == 1
    assert searched(Paper(10**6), most=64).recommended == 64


def test_what_fits_is_measured_in_turn() -> None:
    paper = Paper(3)
    sizes = searched(paper)
    assert paper.measured[-6:] == [1, 2, 3, 1, 2, 3]
    last = sizes.candidates[2]
    assert last.samples_per_second == Spread(median=3.0, low=3.0, high=3.0, windows=5, values=(3.0,) * 5)
    assert last.peak_memory_mb == (30.0,)


# How a size is tried


class Greedy(nn.Module):
    """Batches of more than ``limit`` samples need more memory than any machine has. Notes what it was given."""

    def __init__(self, limit: int = 10**6, broken: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.limit, self.broken = limit, broken
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs)
        if self.broken:
            raise RuntimeError("the model's own mistake")
        outputs: Tensor = self.layer(inputs)
        if len(inputs) > self.limit:
            torch.empty(REFUSED_BYTES, dtype=torch.uint8)
        return outputs


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_WINDOW_SECONDS", 0.005)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def trial(*, most: int | None = None, **sections: Any) -> Tuning:
    made = toys.trial(max_steps=2, kind=Tuning, **{"train": {"precision": "fp32"}, **sections})
    allowed = (*made.allowed, "test_batch_size")
    assert isinstance(made, Tuning)
    return made.model_copy(update={"allowed": allowed, "max_batch_size": most})


def model(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"test_batch_size.{name}", **arguments}


ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1}


def test_a_size_that_was_refused_leaves_no_trace() -> None:
    context = build(trial(model=model("Greedy", limit=4), optimizer=ADAM), rank=Rank())
    before = [parameter.clone() for parameter in context.model.parameters()]
    on_bench = TrialBench(context)

    assert [on_bench.fits(size) for size in (2, 8, 3, 5, 4)] == [True, False, True, False, True]
    assert on_bench.rate(4) > 0
    assert all(parameter.grad is None for parameter in context.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, context.model.parameters(), strict=True))


class Halfway(torch.optim.SGD):
    """Makes its state in two parts, and finds no memory for the second one at first."""

    refusals = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if not (state := self.state[parameter]):
                state["first"] = torch.zeros_like(parameter)
                if self.refusals:
                    self.refusals -= 1
                    torch.empty(REFUSED_BYTES, dtype=torch.uint8)
                state["second"] = torch.zeros_like(parameter)
            parameter.add_(state["second"])


def test_an_optimizer_that_was_stopped_halfway_starts_afresh() -> None:
    context = build(trial(optimizer=model("Halfway", lr=0.1)), rank=Rank())
    on_bench = TrialBench(context)
    assert [on_bench.fits(2), on_bench.fits(1)] == [False, True]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "fp16"])
def test_the_optimizers_memory_is_part_of_it(precision: str) -> None:
    context = build(trial(model=model("Greedy"), optimizer=ADAM, train={"precision": precision}), rank=Rank())
    assert TrialBench(context).fits(4)
    assert len(context.optimizer.state) == 2  # weight and bias


@pytest.mark.parametrize("size", [1, 30, 300])
def test_batches_are_real_samples_repeated_where_there_are_too_few(size: int) -> None:
    context = build(trial(model=model("Greedy")), rank=Rank())
    assert TrialBench(context).fits(size)

    inputs = context.model.seen[-1]
    assert inputs.shape == (size, 3)
    assert torch.equal(inputs[: toys.SAMPLES], context.batches.read(list(range(min(size, toys.SAMPLES))))[0])
    assert len(inputs.unique(dim=0)) == min(size, toys.SAMPLES)


def test_batches_of_a_form_of_their_own_are_read_whole() -> None:
    """Such as sequences that a collate function has stacked along the second dimension."""
    sections = {"loader": {"collate": model("transposing")}, "task": model("TransposedTask"), "loss": None}
    context = build(trial(model=model("Greedy"), **sections), rank=Rank())
    on_bench = TrialBench(context)
    for size in (5, 3):
        assert on_bench.fits(size)
        assert context.model.seen[-1].shape == (size, 3)


def transposing() -> Any:
    return lambda samples: torch.stack([inputs for inputs, _ in samples], dim=1)


class TransposedTask(toys.NamedTask):
    def __call__(self, model: nn.Module, batch: Any) -> toys.StepOutput:
        return super().__call__(model, {"x": batch.T, "y": batch.sum(0)[:, None]})


def test_other_errors_are_the_users() -> None:
    on_bench = TrialBench(build(trial(model=model("Greedy", broken=True)), rank=Rank()))
    with pytest.raises(RuntimeError, match="the model's own mistake"):
        on_bench.fits(1)


def test_a_rank_that_tries_talks_to_nobody() -> None:
    """SyncBatchNorm talks to the others in the middle of a forward pass: one without memory would keep them waiting."""
    ddp = trial(model={"_target_": "toys.Normed", "num_features": 3}, data={"_target_": "toys.triples"})
    with process_group(ddp.model_copy(update={"strategy": "ddp"}), rank=Rank(), store=None, end=None):
        context = build(ddp, rank=Rank())
        on_bench = TrialBench(context)
        assert on_bench.fits(4)
        on_bench.rate(4)

        alone, *_ = context.model.groups
        assert alone is not None
        assert torch.distributed.get_world_size(alone) == 1
        assert context.model.groups[-1] is context.model.process_group is None


def test_a_size_leaves_memory_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL allocates its own on first use, where a rank that finds none would keep the others waiting."""
    on_bench = TrialBench(build(trial(model=model("Greedy")), rank=Rank()))
    free = iter([2**30, 2**27])
    monkeypatch.setattr(TrainContext, "gpus", [0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 2**36))
    assert [on_bench.fits(1), on_bench.fits(2)] == [True, False]


def test_a_window_copies_its_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU, to which training copies a batch during the step before."""
    context = build(trial(model=model("Greedy")), rank=Rank())
    on_bench = TrialBench(context)
    copies: list[Any] = []
    taken = TrialBench._seconds
    with monkeypatch.context() as patch:
        # However slow the machine is, a window has two steps.
        patch.setattr(bench, "_WINDOW_SECONDS", 0.2)
        patch.setattr(TrialBench, "_seconds", lambda *given, **steps: taken(*given, **steps) and 0.1)
        patch.setattr(context.batches, "copy_to_device", lambda batch: copies.append(batch) or batch)
        on_bench.rate(4)
    assert len(copies) == 1 < len(context.model.seen)

    context.batches._device = torch.device("meta")
    assert context.batches.copy_to_device(copies[0])[0].device.type == "meta"


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")]
)
def test_some_types_are_all_about_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_the_allocator_of_the_cpu_has_no_type_of_its_own() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(REFUSED_BYTES, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_other_errors_are_not_about_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("out of memory"))


# All of it on one rank


def test_the_sizes_of_a_trial() -> None:
    sizes = find(trial(model=model("Greedy", limit=5), most=16), rank=Rank())
    assert tried(sizes) == [1, 2, 4, 5, 6, 8]
    assert sizes.largest_that_fits == 5
    assert sizes.recommended is not None
    assert sizes.train_samples == toys.SAMPLES


def test_the_data_limit_the_sizes() -> None:
    assert max(tried(find(trial(data={"_target_": "toys.regression", "samples": 3}), rank=Rank()))) == 3


def test_batch_norm_starts_at_two() -> None:
    assert min(tried(find(trial(model={"_target_": "toys.batch_norm_net"}, most=4), rank=Rank()))) == 2


def test_fewer_samples_than_devices_are_refused() -> None:
    many = trial(data={"_target_": "toys.regression", "samples": 3}).model_copy(update={"workers": 4})
    with pytest.raises(ExperimentError, match="the training set has 3 samples for 4 devices"):
        find(many, rank=Rank())


def test_a_rank_reports_what_it_found() -> None:
    outbox = toys.Kept()
    main.run(trial(most=2), rank=Rank(), outbox=outbox)
    event = outbox.events[-1]  # heartbeats come before, if it takes long
    assert isinstance(event, BatchSizesFound)
    assert tried(event.sizes) == [1, 2]


def test_a_failure_shows_the_users_code_first() -> None:
    outbox = toys.Kept()
    with pytest.raises(main.WorkerFailed):
        main.run(trial(model={"_target_": "toys.BrokenModel"}), rank=Rank(), outbox=outbox)
    event = outbox.events[-1]
    assert isinstance(event, Failed)
    assert "toys.py" in event.traceback.splitlines()[1]


# What to write in the file


def advised(
    recommended: int,
    *,
    batch: int,
    split: int = 1,
    largest: int | None = None,
    noise: float = 0.0,
    **train: Any,
) -> BatchAdvice:
    def rate(size: int) -> Spread:
        own = noise if size == recommended else 0.0  # noise of all sizes in a round would cancel
        return spread(in_turn(size, noise=own), keeps_values=True)

    sections = {"train": {"global_batch_size": batch, "gradient_accumulation": split, **train}}
    made = trial(**sections).model_copy(update={"workers": 2})
    candidates = [
        BatchCandidate(batch_size=size, fits=True, samples_per_second=rate(size))
        for size in (1, 2, 4, 8, 16, 32, 64)
        if size <= (largest or 64)
    ]
    sizes = BatchSizes(
        candidates=tuple(candidates), largest_that_fits=largest, recommended=recommended, train_samples=1000
    )
    return advise_batch(made, sizes, recommended=recommended)


@pytest.mark.parametrize(
    ("most", "largest"),
    [
        (None, "Largest that fits: at least 1 sample; memory never ran out."),
        (1, "Largest that fits: 1 sample."),
        (2000, "Largest that fits: 2,000 samples."),
    ],
)
def test_the_largest_size_is_counted(most: int | None, largest: str) -> None:
    only = BatchCandidate(batch_size=1, fits=True)
    tuned = Tuned(candidates=(only,), largest_that_fits=most, recommended=1, workers=1, global_batch_size=1, change=())
    told = TunedReport(tuned=tuned, name="lab", title="single", hardware="", replicas=1, declared=1, reason="")

    assert told.blocks[0][0] == largest
    assert told.verdict == "single: 1 sample per device, the smallest batch within 5% of the best throughput"


def test_the_right_size_is_left_alone() -> None:
    assert advised(32, batch=64) == ((), "Nothing to change: the file's 64 = 2 devices x 32 is the recommended size.")


def test_a_larger_global_batch_comes_with_a_learning_rate() -> None:
    advice = advised(32, batch=16)
    assert advice.change == (
        "train.global_batch_size: 64",
        "train.lr_scaling: {rule: linear, base_batch_size: 16}",
    )
    for words in ("16 = 2 devices x 8", "(8 samples/s)", "changes the training", "16 instead of 63 optimizer steps"):
        assert words in advice.reason


def test_noise_is_no_reason_to_change_the_training() -> None:
    advice = advised(32, batch=32, noise=0.9)  # 1.9 to the power of 1.09 is above 2
    assert advice == (
        (),
        "Nothing to change: the file's 32 = 2 devices x 16 is as fast as the recommended size within the noise.",
    )
    assert advised(32, batch=32, noise=0.8).change


def test_a_learning_rate_that_follows_already_is_left_alone() -> None:
    advice = advised(32, batch=16, lr_scaling={"rule": "sqrt", "base_batch_size": 8})
    assert advice.change == ("train.global_batch_size: 64",)
    assert "follows by train.lr_scaling (sqrt)" in advice.reason


def test_what_does_not_fit_is_accumulated() -> None:
    advice = advised(16, batch=256, largest=16)
    assert advice.change == ("train.gradient_accumulation: 8",)
    assert advice.reason.startswith("The file's 256 = 2 devices x 128 doesn't fit.")
    assert advice.reason.endswith("256 = 2 devices x 8 micro-batches x 16.")


def test_what_is_larger_than_needed_is_accumulated() -> None:
    advice = advised(8, batch=60)
    assert advice.change == ("train.gradient_accumulation: 4",)
    assert "60 = 2 devices x 30 is larger than it needs to be" in advice.reason


def test_what_was_not_tried_is_left_alone() -> None:
    advice = advised(64, batch=1024)
    assert advice.change == ()
    assert "larger than all sizes tried" in advice.reason


def test_accumulation_that_is_not_needed_goes_first() -> None:
    advice = advised(32, batch=64, split=4)
    assert advice.change == ("train.gradient_accumulation: 1",)
    assert "keeps the global batch" in advice.reason
    assert advised(32, batch=16, split=4).change == (
        "train.gradient_accumulation: 1",
        "train.global_batch_size: 64",
        "train.lr_scaling: {rule: linear, base_batch_size: 16}",
    )


@pytest.mark.parametrize("batch", [2, 5, 64, 100, 101])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("recommended", [1, 3, 32, 64])
def test_the_file_with_the_change_is_valid_and_needs_no_other(recommended: int, split: int, batch: int) -> None:
    if split > batch // 2:
        return
    advice = advised(recommended, batch=batch, split=split)
    train: dict[str, Any] = {"batch": batch, "split": split}
    for line in advice.change:
        key, _, value = line.removeprefix("train.").partition(": ")
        train |= {"batch": int(value)} if key == "global_batch_size" else {}
        train |= {"split": int(value)} if key == "gradient_accumulation" else {}

    again = trial(train={"global_batch_size": train["batch"], "gradient_accumulation": train["split"]})
    size = again.model_copy(update={"workers": 2}).device_batch_size
    assert size <= max(recommended, -(-batch // (2 * (batch // 2))))
    assert size > recommended / 2
    assert train["batch"] == batch or size == recommended
