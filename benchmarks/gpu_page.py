"""The tables of docs/status.md about GPUs: what a GPU has to prove, and what benchmarks/results/gpu.json says of it.

    python benchmarks/gpu_page.py      # write them again, from results/gpu.json, or without that file "not run"

`benchmarks/gpu.py` calls it when it has measured.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "status.md"
RESULT = Path(__file__).parent / "results" / "gpu.json"
BEGIN, END = "<!-- begin: benchmarks/gpu_page.py -->\n", "<!-- end -->\n"
NOT_RUN, PASSED = "not run", "passed"
CASES = {"ResNet-50": "ResNet-50, bf16, channels_last", "GPT-2 small": "GPT of 124 million parameters, bf16"}
TRAINING = "training"
"""Name of a training by pipeline, whose reports are part of its time."""
WINDOWS = 3
"""Windows of each way in a round."""
TESTS = {
    "test_ranks_over_nccl_train_as_one_process": "ddp and fsdp over NCCL train what one process trains, in fp64",
    "test_offloaded_shards_train_as_one_process": "fsdp with `cpu_offload` trains what one process trains",
    "test_fp16_leaves_out_steps_until_the_scale_fits": "fp16: steps that overflow are left out until the scale fits",
    "test_bf16_in_channels_last_trains_as_fp32": "bf16 in channels_last, compiled and not, has the losses of fp32",
    "test_peak_memory_is_that_of_torch": "peak memory is torch's own figure",
    "test_a_batch_without_memory_is_reported_as_such": "a batch that does not fit is reported as a lack of memory",
    "test_utilization_and_energy_are_read": "utilization and energy are read",
    "test_a_resumed_training_has_the_weights_of_a_whole_one": "a resumed training has the weights of a whole one, "
    "contiguous and channels_last",
    "test_the_exported_program_computes_what_was_trained": "the exported program, loaded, computes what was trained",
    "test_cuda_graphs_train_and_evaluate_as_eager_code": "CUDA graphs train and evaluate as eager code",
    "test_tf32_by_the_newer_api_trains": "a model that sets TF32 by `torch.backends` trains",
    "test_batches_that_move_themselves_reach_the_gpu": "batches that are objects with a method `to` reach the GPU",
    "test_the_peak_memory_is_not_from_the_training_before": "the peak memory is not from the training before",
    "test_epochs_do_not_pile_up_cached_memory": "epochs and evaluations do not pile up cached memory",
    "test_planning_counts_the_gpus_that_torch_sees": "planning counts the GPUs that torch sees",
    "test_system_metrics_have_the_gpu": "system metrics have the GPU",
    "test_an_error_of_the_last_rank_arrives_at_once": "an error of the last rank arrives within seconds: while "
    "building, in the first step, in the third",
    "test_an_error_ends_a_process_of_its_own": "an error ends the rank's process",
    "test_a_training_follows_one_that_failed_in_the_same_process": "a training follows one that failed in the same "
    "process",
    "test_a_rank_that_hangs_is_named": "a rank that hangs is named, before NCCL aborts the other rank",
    "test_dp_trains_as_one_process": "dp trains what one process trains, in fp64",
    "test_replicas_of_dp_compute_in_bf16_on_the_gpus_of_the_trial": "replicas of dp compute in bf16, on as many GPUs "
    "as the trial has",
    "test_ranks_under_ray_train_as_one_process": "ddp under Ray trains what one process trains, in fp64",
    "test_a_speedup_is_measured_next_to_the_training": "a speedup is measured, with the baseline on the first GPU",
    "test_a_training_that_fills_the_memory_has_a_speedup": "a training that fills 70% of the memory has a speedup",
}
"""Claims by the names of the tests in tests/slow/gpu."""


SPEED_HEAD = ["| training | throughput | MFU | data loading | peak memory |", "|---|---|---|---|---|"]
TEST_HEAD = ["| claim of a test | result |", "|---|---|"]


def table(result: Mapping[str, Any] | None) -> str:
    """Return the tables in Markdown; without a result each claim is "not run"."""
    where = []
    if result:
        tiny = "; tiny: the figures mean nothing" if result["tiny"] else ""
        where = [
            " ".join([f"{result['device']}, torch {result['torch']}, {result['date']}{tiny}.", *result["remarks"]]),
            "",
        ]
    return "\n".join([*where, *SPEED_HEAD, *_speeds(result), "", *_tests(result["tests"] if result else {}), ""])


def _speeds(result: Mapping[str, Any] | None) -> Iterator[str]:
    figures = {(one["case"], one["compiled"], one["who"]): one for one in result["figures"]} if result else {}
    for case, shown in CASES.items():
        for compiled in (False, True):
            own, other = (figures.get((case, compiled, who)) for who in ("pipeline", "bare"))
            found = _compared(own, other) if own and other else [NOT_RUN] * 4
            if other and (training := figures.get((case, compiled, TRAINING))):
                found[0] += f"; a training with its reports {_ratio(training, other)}"
            yield f"| {shown}{', compiled' if compiled else ''} | {' | '.join(found)} |"


def _compared(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    wait = own["data_wait_share"]
    used = "" if own["utilization"] is None else f", utilization {own['utilization']:.0f}%"
    return [
        _ratio(own, other),
        f"{own['mfu']:.1%} (script {other['mfu']:.1%}){used}",
        NOT_RUN if wait is None else f"{wait:.1%} of a step",
        f"{own['peak_memory_mb']:,.0f} MiB (script {other['peak_memory_mb']:,.0f} MiB)",
    ]


def _ratio(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    ratios = [one / two for one, two in zip(_rounds(own), _rounds(other), strict=True)]
    return f"{median(ratios):.3f}x ({_spread(ratios)})"


def _spread(ratios: list[float]) -> str:
    if len(ratios) == 1:
        return "one round"
    return f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"


def _rounds(figures: Mapping[str, Any]) -> list[float]:
    windows = figures["samples_per_second"]
    return [median(windows[first : first + WINDOWS]) for first in range(0, len(windows), WINDOWS)]


def _tests(outcomes: Mapping[str, str]) -> Iterator[str]:
    """Yield how many claims passed in each case, and a table of the others."""
    results = {claim: _outcome(name, outcomes) for name, claim in TESTS.items()}
    others = {claim: outcome for claim, outcome in results.items() if outcome != PASSED}
    yield f"{len(results) - len(others)} of {len(results)} claims of the GPU tests passed in every case. The others:"
    yield from ("", *TEST_HEAD)
    yield from (f"| {claim} | {outcome} |" for claim, outcome in others.items())


def _outcome(name: str, outcomes: Mapping[str, str]) -> str:
    found = [outcome for each, outcome in outcomes.items() if each.partition("[")[0] == name]
    return ", ".join(dict.fromkeys(found)).replace("|", "/") if found else NOT_RUN


def update(page: Path, result: Mapping[str, Any] | None) -> None:
    """Replace the tables in a page, between their marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table(result)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    update(PAGE, json.loads(RESULT.read_text()) if RESULT.is_file() else None)
