"""Use of the devices: operations counted by hand, shares of a peak, energy of a fake NVML, prices."""

# promise: operations of a step, counted by hand too; MFU, utilization, energy (fake NVML), price

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import samples
import torch
import toys
from samples import BASELINE, HARDWARE, finished, spread
from torch import Tensor, nn

from pipeline.protocol.events import Warned
from pipeline.protocol.rank import Rank
from pipeline.protocol.trial import CellMeasurement, Trial
from pipeline.protocol.trial_result import Energy, Flops
from pipeline.results import mlflow_names
from pipeline.results.measured import memory_table, result_of_run
from pipeline.results.record import Fact, Result
from pipeline.results.speedup import Row, facts_of, find_main, measure_rows, mfu, tflops
from pipeline.results.terminal import format_full
from pipeline.train.build import build
from pipeline.train.costs import count_operations
from pipeline.train.gauges import EnergyMeter, GpuGauge
from pipeline.train.kept import held_step

A100 = "NVIDIA A100-SXM4-40GB"


# Counting


def counted(**sections: Any) -> tuple[Flops | None, list[str]]:
    """Operations of an experiment, and the warnings."""
    outbox = toys.Kept()
    trial = toys.trial(**sections)
    trial = trial.model_copy(update={"allowed": (*trial.allowed, "test_device")})
    s = build(trial, rank=Rank(), outbox=outbox)
    flops = count_operations(s, held_step(s))
    return flops, [event.message for event in outbox.events if isinstance(event, Warned)]


class Convolving(nn.Module):
    """A convolution whose backward pass needs no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, kernel_size=3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs[:, None]).mean((1, 2))[:, None]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs[:, None, :, None] * self.scale).expand(-1, 1, 3, 4)
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True).mean((1, 2, 3))[
            :, None
        ]


@torch.library.custom_op("test_device::hidden", mutates_args=())
def hidden(inputs: Tensor) -> Tensor:
    """Multiplies matrices in an operator of its own."""
    return inputs @ inputs.new_ones(3, 1)


def refuses(inputs: Tensor) -> Tensor:
    """Can't run under a dispatch mode."""
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        raise RuntimeError("no mode here\nplease")
    return inputs


class Computing(nn.Linear):
    """A linear layer, and something else."""

    def __init__(self, what: str) -> None:
        super().__init__(3, 1)
        self.what = what

    def forward(self, inputs: Tensor) -> Tensor:
        if self.what == "hidden":
            return super().forward(inputs) + torch.ops.test_device.hidden(inputs)
        if self.what == "refuses":
            return super().forward(refuses(inputs))
        # A Fourier transform, which torch has no formula for, and a norm, which is no product
        return super().forward(nn.functional.normalize(torch.fft.rfft(inputs, n=4).real))


class TestCounting:
    @pytest.mark.parametrize(
        ("sections", "of_sample"),
        [
            ({}, {"fp64": 2 * 3 + 2 * 3}),  # once forward and once for the weights: the input needs no gradient
            ({"train": {"gradient_accumulation": 3}}, {"fp64": 12}),
            ({"train": {"precision": "fp32"}}, {"fp32": 12}),
            ({"train": {"precision": "bf16"}}, {"bf16": 12}),
            # forward and weights: 3 places, 3 taps, 1 to 2 channels
            ({"model": {"_target_": "test_device.Convolving"}}, {"fp64": 2 * (2 * 3 * 3 * 1 * 2)}),
            # 2 products forward and 5 backward, of 3 queries and 3 keys of width 4
            ({"model": {"_target_": "test_device.Attending"}}, {"fp64": (2 + 5) * 2 * 3 * 3 * 4}),
        ],
        ids=["linear", "micro-batches", "fp32", "bf16", "convolution", "attention on a CPU"],
    )
    def test_operations_are_those_counted_by_hand(self, sections: dict[str, Any], of_sample: dict[str, float]) -> None:
        assert counted(**sections) == (Flops(of_sample=of_sample), [])

    def test_what_is_recomputed_does_not_count(self) -> None:
        model = {"_target_": "toys.Branches"}
        plain, _ = counted(model=model, train={"precision": "fp32"})
        again, _ = counted(model=model, train={"precision": "fp32", "activation_checkpointing": True})
        assert plain == again
        assert plain is not None

    @pytest.mark.parametrize(("what", "name"), [("hidden", "test_device::hidden"), ("transforms", "aten::_fft_r2c")])
    def test_operators_without_a_formula_are_named(self, what: str, name: str) -> None:
        found = counted(model={"_target_": "test_device.Computing", "what": what})
        assert found == (Flops(of_sample={"fp64": 12.0}, uncounted=(name,)), [])

    def test_a_model_that_can_not_be_counted_is_told_once(self) -> None:
        message = "could not count the FLOPs of a step, so none are reported: no mode here"
        assert counted(model={"_target_": "test_device.Computing", "what": "refuses"}) == (None, [message])

    def test_trainings_and_cells_are_counted_once_and_train_only_is_not(self) -> None:
        assert toys.trained(measures=True)[0].flops is not None
        assert toys.trained(max_steps=5, kind=CellMeasurement)[0].flops is not None
        assert toys.trained(max_steps=5)[0].flops is None
        assert toys.trained()[0].flops is None


# The peak


def row(*, gpus: int = 2, gpu: str = A100, price: float | None = None, rate: float = 1000.0, **result: Any) -> Row:
    trial = samples.trial("main", "main", strategy="ddp", workers=2, gpus=1 if gpus else 0)
    end = finished("main", spread(rate), communication=0.0, gpus=(gpu,) * gpus, whole_training=3600_000, **result)
    return find_main(measure_rows([priced(trial, price)], [end]))


def priced(trial: Trial, price: float | None) -> Trial:
    measure = trial.experiment.benchmark.model_copy(update={"price_per_device_hour": price})
    return trial.model_copy(update={"experiment": trial.experiment.model_copy(update={"benchmark": measure})})


def flops(**of_sample: float) -> Flops:
    return Flops(of_sample=of_sample)


def test_a_gpu_is_known_by_its_whole_name() -> None:
    known = {
        A100: 312, "A100-PCIE-40GB": 312, "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H200": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA L4": 121,
    }  # fmt: skip
    others = ("Tesla T4", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA L40", "NVIDIA A10G", "")
    shares = {gpu: mfu(row(gpu=gpu, flops=flops(bf16=2e9))) for gpu in (*known, *others)}
    assert {gpu: share and 1 / share for gpu, share in shares.items()} == {
        **{gpu: pytest.approx(peak) for gpu, peak in known.items()},
        **dict.fromkeys(others),
    }


class TestOperationsPerSecond:
    @pytest.mark.parametrize(
        ("gpu", "of_sample", "share"),
        [
            (A100, {"bf16": 62.4e9}, 0.1),
            (A100, {"tf32": 31.2e9, "fp32": 3.9e9}, 0.2),  # each arithmetic has its own peak: a tenth of the time each
            *((gpu, {name: 3e9}, None)
              for gpu, name in (("NVIDIA A10G", "bf16"), (A100, "complex64"), ("Tesla T4", "bf16"))),
        ],
    )  # fmt: skip
    def test_the_share_of_the_peak_of_all_devices_or_none_where_it_is_not_known(
        self, gpu: str, of_sample: dict[str, float], share: float | None
    ) -> None:
        one = row(gpu=gpu, flops=Flops(of_sample=of_sample))
        assert tflops(one) == pytest.approx(sum(of_sample.values()) / 1e9)
        assert mfu(one) == (None if share is None else pytest.approx(share))

    def test_a_cpu_has_no_peak(self) -> None:
        facts = facts_of(row(gpus=0, flops=flops(fp32=14.2e6)))
        assert (facts["tflops"].value, facts["mfu"].value) == (pytest.approx(0.0142), None)

    def test_a_table_has_columns(self) -> None:
        assert device_cells(row(flops=flops(bf16=62.4e9))) == {"tflops": "62.4", "mfu": "10%"}
        assert device_cells(row(gpus=0, flops=flops(fp32=14.2e6))) == {"tflops": "0.0142"}
        assert device_cells(row()) == {}

    def test_rows_that_counted_nothing_have_the_count_of_the_training(self) -> None:
        ends = [finished("main", spread(190), flops=flops(fp32=1e9)), finished("baseline", spread(100))]
        rows = measure_rows([samples.MAIN, BASELINE], ends)
        assert [tflops(each) for each in rows] == [pytest.approx(0.1), pytest.approx(0.19)]


def device_cells(one: Row) -> dict[str, str]:
    """What the table of memory and devices has about a row's devices."""
    table = memory_table([one])
    assert table is not None
    cells = (cell for cell in table.rows[0] if isinstance(cell, Fact))
    return {cell.key: str(cell) for cell in cells if cell.key in ("tflops", "mfu", "gpu_utilization")}


class TestUtilization:
    def test_it_is_the_mean_of_what_the_driver_says_at_each_report(self, monkeypatch: pytest.MonkeyPatch) -> None:
        readings = iter([40, 90, 60, 70])
        monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(readings))
        gauge = GpuGauge([0, 1])
        gauge.read()
        gauge.read()
        assert gauge.means() == [50.0, 80.0]

    def test_there_is_none_where_the_driver_does_not_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "utilization", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)))
        gauge = GpuGauge([0])
        gauge.read()
        assert gauge.means() == []

    def test_the_result_has_that_of_the_idlest_gpu(self) -> None:
        assert device_cells(row(gpu_utilization=(91.0, 71.0))) == {"gpu_utilization": "71"}
        assert device_cells(row(gpu_utilization=())) == {}


# Energy


class FakeNvml:
    """Counters of GPUs in mJ by UUID, which grow by what they are told; a counter of None is not supported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **counters: int | None) -> None:
        self.counters = counters
        self.open = 0
        for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"):
            monkeypatch.setattr(pynvml, name, getattr(self, name))
        ids = [SimpleNamespace(uuid=name.removeprefix("GPU_")) for name in counters]
        monkeypatch.setattr(torch.cuda, "get_device_properties", ids.__getitem__)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid.replace("-", "_")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if (value := self.counters[handle]) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def metered(gpus: list[int], *, is_training: bool = True) -> EnergyMeter:
    trial = toys.trial() if is_training else toys.trial(max_steps=2)
    return EnergyMeter(SimpleNamespace(trial=trial, rank=Rank(), strategy=SimpleNamespace(gpus=gpus)))  # type: ignore[arg-type]


class TestEnergy:
    def test_the_counters_differences_are_summed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = FakeNvml(monkeypatch, GPU_a=5_000, GPU_b=1_000)
        meter = metered([0, 1])
        nvml.counters = {"GPU_a": 9_000, "GPU_b": 1_500}
        assert meter.of(90) == Energy(joules=4.5, samples=90)
        assert meter.of(0) is None
        assert nvml.open == 0

    def test_one_gpu_without_a_counter_leaves_all_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml = FakeNvml(monkeypatch, GPU_a=5_000, GPU_b=None)
        assert metered([0, 1]).of(90) is None
        assert nvml.open == 0

    def test_only_trainings_on_gpus_read_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        FakeNvml(monkeypatch, GPU_a=5_000)
        assert metered([0], is_training=False).of(90) is None
        assert metered([]).of(90) is None

    def test_a_training_has_that_of_the_samples_that_it_trained_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EnergyMeter, "of", lambda self, samples: Energy(joules=1.0, samples=samples))
        assert toys.trained()[0].energy == Energy(joules=1.0, samples=2 * toys.SAMPLES)

    def test_the_result_says_what_a_sample_took(self) -> None:
        facts = facts_of(row(energy=Energy(joules=7.2e6, samples=3_600_000)))
        assert (facts["energy_kwh"].value, facts["energy_j_per_sample"].value) == (2.0, 2.0)
        facts = facts_of(row())
        assert (facts["energy_kwh"].value, facts["energy_j_per_sample"].value) == (None, None)


# The price


def reported(price: float | None, **more: Any) -> Result:
    trials = [priced(trial, price) for trial in (samples.MAIN, BASELINE)]
    known = {"whole_training": 360_000, "start_s": None}
    ends = [finished("main", spread(200), **known, **more), finished("baseline", spread(100), **known, **more)]
    return result_of_run(measure_rows(trials, ends), hardware=HARDWARE)


def cost(one: Row) -> float | None:
    return facts_of(one)["cost"].value


class TestPrice:
    def test_each_row_costs_its_device_hours(self) -> None:
        costs = {fact.trial: fact.value for fact in reported(2.5).all_facts if fact.key == "cost"}
        assert costs == {"main": pytest.approx(2.5), "baseline": pytest.approx(2.5)}

    def test_its_start_is_paid_too_and_there_is_none_without_a_price_or_a_time(self) -> None:
        rows = [row(price=1.0, rate=1000.0, start_s=start) for start in (0.0, 3600.0)]
        assert [cost(one) for one in rows] == [pytest.approx(2.0), pytest.approx(4.0)]
        assert (reported(None).fact("cost"), cost(row(price=None))) == (None, None)
        (unknown,) = measure_rows([priced(samples.MAIN, 1.0)], [finished("main", spread(200))])
        assert cost(unknown) is None

    def test_programs_and_people_get_it(self) -> None:
        result = reported(2.5, flops=flops(fp32=1e6), energy=Energy(joules=30.0, samples=10))
        sent = mlflow_names.metrics(result)["main"]
        assert (sent["cost"], sent["tflops"], "mfu" in sent) == (pytest.approx(2.5), pytest.approx(2e-4), False)
        assert Result.model_validate_json(result.model_dump_json()) == result
        (line,) = (line for line in format_full(result) if line.startswith("estimated price of the training"))
        assert line.endswith(" 2.5")
