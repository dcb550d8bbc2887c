"""Use of the devices: shares of a peak, utilization, energy of a fake NVML, prices."""

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

from pipeline.protocol.trial import Rank, Trial
from pipeline.protocol.trial_result import Energy, Flops
from pipeline.results import record
from pipeline.results.measured import memory_table, result_of_run
from pipeline.results.record import Fact, Result
from pipeline.results.speedup import Row, facts_of, find_main, measure_rows, mfu, tflops
from pipeline.results.terminal import format_full
from pipeline.train.gauges import EnergyMeter, GpuGauge

A100 = "NVIDIA A100-SXM4-40GB"


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
    gpu: str, of_sample: dict[str, float], share: float | None
) -> None:
    one = row(gpu=gpu, flops=Flops(of_sample=of_sample))
    assert tflops(one) == pytest.approx(sum(of_sample.values()) / 1e9)
    assert mfu(one) == (None if share is None else pytest.approx(share))


def device_cells(one: Row) -> dict[str, str]:
    """What the table of memory and devices has about a row's devices."""
    table = memory_table([one])
    assert table is not None
    cells = (cell for cell in table.rows[0] if isinstance(cell, Fact))
    return {cell.key: str(cell) for cell in cells if cell.key in ("tflops", "mfu", "gpu_utilization")}


def test_a_table_has_columns() -> None:
    assert device_cells(row(flops=flops(bf16=62.4e9))) == {"tflops": "62.4", "mfu": "10%"}
    assert device_cells(row(gpus=0, flops=flops(fp32=14.2e6))) == {"tflops": "0.0142"}, "a CPU has no peak"
    assert device_cells(row()) == {}
    assert device_cells(row(gpu_utilization=(91.0, 71.0))) == {"gpu_utilization": "71"}, "of the idlest GPU"


def test_rows_that_counted_nothing_have_the_count_of_the_training() -> None:
    ends = [finished("main", spread(190), flops=flops(fp32=1e9)), finished("baseline", spread(100))]
    rows = measure_rows([samples.MAIN, BASELINE], ends)
    assert [tflops(each) for each in rows] == [pytest.approx(0.1), pytest.approx(0.19)]


# Utilization and energy


def test_it_is_the_mean_of_what_the_driver_says_at_each_report(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([40, 90, 60, 70])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(readings))
    gauge = GpuGauge([0, 1])
    gauge.read()
    gauge.read()
    assert gauge.means() == [50.0, 80.0]


def test_there_is_none_where_the_driver_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)))
    gauge = GpuGauge([0])
    gauge.read()
    assert gauge.means() == []


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


def test_the_counters_differences_are_summed_in_trainings_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch, GPU_a=5_000, GPU_b=1_000)
    meter = metered([0, 1])
    nvml.counters = {"GPU_a": 9_000, "GPU_b": 1_500}
    assert meter.of(90) == Energy(joules=4.5, samples=90)
    assert meter.of(0) is None
    assert nvml.open == 0
    assert metered([0], is_training=False).of(90) is None
    assert metered([]).of(90) is None


def test_one_gpu_without_a_counter_leaves_all_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch, GPU_a=5_000, GPU_b=None)
    assert metered([0, 1]).of(90) is None
    assert nvml.open == 0


def test_a_training_has_that_of_the_samples_that_it_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnergyMeter, "of", lambda self, samples: Energy(joules=1.0, samples=samples))
    assert toys.trained()[0].energy == Energy(joules=1.0, samples=2 * toys.SAMPLES)


def test_the_result_says_what_a_sample_took() -> None:
    for energy, expected in ((Energy(joules=7.2e6, samples=3_600_000), 2.0), (None, None)):
        facts = facts_of(row(energy=energy))
        assert (facts["energy_kwh"].value, facts["energy_j_per_sample"].value) == (expected, expected)


# The price


def reported(price: float | None, **more: Any) -> Result:
    trials = [priced(trial, price) for trial in (samples.MAIN, BASELINE)]
    known = {"whole_training": 360_000, "start_s": None}
    ends = [finished("main", spread(200), **known, **more), finished("baseline", spread(100), **known, **more)]
    return result_of_run(measure_rows(trials, ends), hardware=HARDWARE)


def cost(one: Row) -> float | None:
    return facts_of(one)["cost"].value


def test_each_row_costs_its_device_hours() -> None:
    costs = {fact.trial: fact.value for fact in reported(2.5).all_facts if fact.key == "cost"}
    assert costs == {"main": pytest.approx(2.5), "baseline": pytest.approx(2.5)}


def test_its_start_is_paid_too_and_there_is_none_without_a_price_or_a_time() -> None:
    rows = [row(price=1.0, rate=1000.0, start_s=start) for start in (0.0, 3600.0)]
    assert [cost(one) for one in rows] == [pytest.approx(2.0), pytest.approx(4.0)]
    assert (reported(None).fact("cost"), cost(row(price=None))) == (None, None)
    (unknown,) = measure_rows([priced(samples.MAIN, 1.0)], [finished("main", spread(200))])
    assert cost(unknown) is None


def test_programs_and_people_get_it() -> None:
    result = reported(2.5, flops=flops(fp32=1e6), energy=Energy(joules=30.0, samples=10))
    sent = record.mlflow_metrics(result)["main"]
    assert (sent["cost"], sent["tflops"], "mfu" in sent) == (pytest.approx(2.5), pytest.approx(2e-4), False)
    assert Result.model_validate_json(result.model_dump_json()) == result
    (line,) = (line for line in format_full(result) if line.startswith("estimated price of the training"))
    assert line.endswith(" 2.5")
