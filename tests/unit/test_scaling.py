"""The model of scaling against cases that can be worked out by hand."""

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from pipeline.errors import UsageError
from pipeline.protocol.trial_result import AllReduce, BatchCost, Costs, Gradient, Link
from pipeline.results.prediction import (
    Workload,
    broadcast_ms,
    fill_buckets,
    fit_link,
    latency_ms,
    make_workload,
    parse_link,
    predict,
    transfer_ms,
)

MB = 1_000_000
PERFECT = Link(latency_us=0, bandwidth_gbit=1e12)
BYTES_A_MS = Link(latency_us=0, bandwidth_gbit=8e-6)  # 1 byte a millisecond


def workload(
    *, gradients=((8 * MB, 1.0),), forward_ms=1.0, backward_ms=2.0, fixed_ms=0.0, data_ms=0.0, optimizer_ms=0.0,
    batch=64, buffer_bytes=0, **more,
):  # fmt: skip
    """Costs are for each sample, apart from ``fixed_ms`` of forward."""
    curve = tuple(
        BatchCost(
            samples=size,
            forward_ms=fixed_ms + size * forward_ms,
            backward_ms=size * backward_ms,
            data_ms=size * data_ms,
        )
        for size in (1, batch)
    )
    costs = Costs(
        curve=curve, buffer_bytes=buffer_bytes, world_size=1,
        gradients=tuple(Gradient(bytes=size, ready=ready) for size, ready in gradients),
    )  # fmt: skip
    return Workload(costs=costs, optimizer_ms=optimizer_ms, global_batch_size=batch, **more)


# One all-reduce


def test_ring_all_reduce_by_hand():
    link = Link(latency_us=500, bandwidth_gbit=0.8)  # 100,000 bytes a millisecond
    assert latency_ms(link, workers=4, backend="nccl") == pytest.approx(2 * 3 * 0.5)
    assert transfer_ms(link, 4 * MB, workers=4) == pytest.approx(2 * 3 / 4 * 40)


def test_a_hop_is_two_messages_under_gloo():
    # Measured with workers in network namespaces, 5.2 ms one way: 20.8 ms with 2 workers, 62.4 ms with 4.
    link = Link(latency_us=5200, bandwidth_gbit=1)
    assert latency_ms(link, workers=2, backend="gloo") == pytest.approx(20.8)
    assert latency_ms(link, workers=4, backend="gloo") == pytest.approx(62.4)


def test_broadcast_goes_down_a_tree():
    # Measured in the same place: 10.3 ms among 2 and 3... 15.6 among 4.
    link = Link(latency_us=5200, bandwidth_gbit=1)
    assert broadcast_ms(link, 0, workers=2, backend="gloo") == pytest.approx(10.4)
    assert broadcast_ms(link, 0, workers=4, backend="gloo") == pytest.approx(15.6)
    assert broadcast_ms(BYTES_A_MS, 10, workers=8, backend="nccl") == pytest.approx(30)


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_fit_finds_the_link(workers, backend):
    link = Link(latency_us=70, bandwidth_gbit=2.5)
    measured = [_all_reduce(link, size, workers=workers, backend=backend) for size in (4096, 2**16, 2**20, 2**24)]
    measured[1] = measured[1].model_copy(update={"ms": 10 * measured[1].ms})  # a bad measurement
    found = fit_link(measured, workers=workers, backend=backend)
    assert found.latency_us == pytest.approx(70)
    assert found.bandwidth_gbit == pytest.approx(2.5)


def test_fit_never_finds_a_negative_latency():
    found = fit_link([AllReduce(bytes=1000, ms=1), AllReduce(bytes=2000, ms=3)], workers=2, backend="gloo")
    assert found.latency_us == 0
    assert found.bandwidth_gbit > 0


def _all_reduce(link, size, *, workers, backend):
    ms = latency_ms(link, workers=workers, backend=backend) + transfer_ms(link, size, workers=workers)
    return AllReduce(bytes=size, ms=ms)


# Buckets


def test_buckets_are_those_of_torch():
    torch.manual_seed(0)
    sizes = torch.randint(1, 300_000, (60,)).tolist()
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    for limit in (2**18, 2**20):
        indices, _ = dist._compute_bucket_assignment_by_size(parameters, [limit], [False] * len(parameters))
        expected = sorted(sum(4 * sizes[i] for i in bucket) for bucket in indices)
        gradients = tuple((4 * size, i / len(sizes)) for i, size in enumerate(sizes))
        found = fill_buckets(workload(gradients=gradients, bucket_bytes=limit))
        assert sorted(size for size, _ in found) == expected


def test_buckets_fill_in_the_order_of_readiness():
    gradients = ((300, 0.9), (100, 0.1), (100, 0.2), (50, 1.0))
    assert fill_buckets(workload(gradients=gradients, bucket_bytes=150)) == [(200, 0.2), (300, 0.9), (50, 1.0)]


# Steps


def test_without_communication_scaling_is_linear():
    for workers in (1, 2, 8, 64):
        found = predict(workload(), PERFECT, workers=workers)
        assert found.speedup == pytest.approx(workers)
        assert found.speedup / workers == pytest.approx(1)
        assert found.limit == "compute"


def test_a_link_of_endless_latency_gives_no_speedup():
    found = predict(workload(), Link(latency_us=1e12, bandwidth_gbit=100), workers=2)
    assert found.speedup < 1e-3
    assert found.limit == "latency"


def test_a_step_bound_by_bandwidth_by_hand():
    # Alone 64 samples take 192 ms. Two workers: 32 samples, 96 ms, then 8 MB at 100,000 bytes a ms, 80 ms.
    found = predict(workload(), Link(latency_us=0, bandwidth_gbit=0.8), workers=2)
    assert found.times["step_ms"] == pytest.approx(96 + 80)
    assert found.times["exposed_communication_ms"] == pytest.approx(80)
    assert found.speedup == pytest.approx(192 / 176)
    assert found.limit == "bandwidth"


def test_exchange_hides_behind_backward():
    # Backward of 32 samples takes 64 ms. The first bucket is full after 16 ms and sent in 40; the second at the end.
    link = Link(latency_us=0, bandwidth_gbit=0.8)
    early = workload(gradients=((4 * MB, 0.25), (MB, 1.0)), bucket_bytes=4 * MB)
    assert predict(early, link, workers=2).times["exposed_communication_ms"] == pytest.approx(10)
    one_bucket = early.model_copy(update={"bucket_bytes": 100 * MB})
    assert predict(one_bucket, link, workers=2).times["exposed_communication_ms"] == pytest.approx(50)


def test_buckets_wait_for_each_other():
    # Full after 16 and 32 ms of 64; 80 ms each: the second is sent from 96 to 176.
    link = Link(latency_us=0, bandwidth_gbit=0.8)
    two = workload(gradients=((8 * MB, 0.25), (8 * MB, 0.5)), bucket_bytes=8 * MB)
    assert predict(two, link, workers=2).times["exposed_communication_ms"] == pytest.approx(176 - 64)


def test_gloo_overlaps_latencies_and_nccl_does_not():
    link = Link(latency_us=10_000, bandwidth_gbit=1e9)
    gradients = ((MB, 1.0),) * 4
    gloo = workload(gradients=gradients, bucket_bytes=MB)
    nccl = workload(gradients=gradients, bucket_bytes=MB, backend="nccl")
    assert predict(gloo, link, workers=2).times["exposed_communication_ms"] == pytest.approx(2 * 40, rel=1e-3)
    assert predict(nccl, link, workers=2).times["exposed_communication_ms"] == pytest.approx(4 * 20, rel=1e-3)


def test_gradients_are_exchanged_with_the_last_micro_batch():
    link = Link(latency_us=0, bandwidth_gbit=0.8)
    accumulated = workload(gradients=((8 * MB, 0.0),), micro_batches=4)
    # The last of 4 micro-batches has 8 samples: 16 ms of backward to hide 80 ms behind.
    assert predict(accumulated, link, workers=2).times["exposed_communication_ms"] == pytest.approx(64)


def test_more_micro_batches_than_samples():
    found = predict(workload(batch=4, micro_batches=4, fixed_ms=1.0), PERFECT, workers=2)
    assert found.times["compute_ms"] == pytest.approx(2 * (1 + 3))


def test_compressed_gradients_take_half_the_time():
    link = Link(latency_us=0, bandwidth_gbit=0.8)
    assert predict(workload(compression=2), link, workers=2).times["exposed_communication_ms"] == pytest.approx(40)


def test_buffers_are_broadcast_before_each_step():
    link = Link(latency_us=1000, bandwidth_gbit=1e9)
    without = predict(workload(), link, workers=2).times["exposed_communication_ms"]
    assert predict(workload(buffer_bytes=100), link, workers=2).times["exposed_communication_ms"] == pytest.approx(
        without + 2
    )


def test_the_optimizer_does_not_scale():
    found = predict(workload(optimizer_ms=64), PERFECT, workers=64)
    assert found.speedup == pytest.approx((192 + 64) / (3 + 64))
    assert found.limit == "batch per worker"


def test_a_batch_too_small_is_named():
    found = predict(workload(fixed_ms=10), PERFECT, workers=32)
    assert found.speedup == pytest.approx((10 + 192) / (10 + 6))
    assert found.limit == "batch per worker"


def test_uneven_shares_wait_for_the_largest():
    found = predict(workload(batch=10), PERFECT, workers=4)
    assert found.speedup == pytest.approx(10 / 3)


def test_loading_adds_to_the_step_without_loader_processes():
    alone = predict(workload(data_ms=1.0), PERFECT, workers=1)
    assert alone.times["step_ms"] == pytest.approx(192 + 64)
    assert alone.times["data_wait_ms"] == pytest.approx(64)


def test_loader_processes_load_meanwhile():
    slow = workload(data_ms=6.0, loader_workers=1)
    assert predict(slow, PERFECT, workers=1).times["data_wait_ms"] == pytest.approx(6 * 64 - 192)
    assert predict(slow.model_copy(update={"loader_workers": 2}), PERFECT, workers=1).times["data_wait_ms"] == 0


def test_a_loader_that_cannot_keep_up_is_named():
    # Loading has a constant part, which doesn't shrink with the share.
    costs = workload().costs
    curve = tuple(cost.model_copy(update={"data_ms": 150.0}) for cost in costs.curve)
    costs = costs.model_copy(update={"curve": curve})
    slow = Workload(costs=costs, optimizer_ms=0, global_batch_size=64, loader_workers=1)
    assert predict(slow, PERFECT, workers=8).limit == "loader"


def test_contention_is_named():
    found = predict(workload(slowdown=1.5), PERFECT, workers=2)
    assert found.speedup == pytest.approx(2 / 1.5)
    assert found.limit == "contention"


def test_parts_add_up():
    found = predict(
        workload(optimizer_ms=3, data_ms=0.1, slowdown=1.2), Link(latency_us=100, bandwidth_gbit=1), workers=4
    )
    assert sum(found.times.values()) == pytest.approx(2 * found.times["step_ms"])


def test_times_between_and_beyond_the_measured_sizes():
    # The measured sizes are 1 and 64: 10 + 3 for each sample.
    assert predict(workload(fixed_ms=10), PERFECT, workers=4).times["compute_ms"] == pytest.approx(10 + 3 * 16)
    larger = workload(fixed_ms=10).model_copy(update={"global_batch_size": 128})
    assert predict(larger, PERFECT, workers=1).times["compute_ms"] == pytest.approx(10 + 3 * 128)


# Links in words


@pytest.mark.parametrize(
    ("text", "gbit", "us"),
    [
        ("10Gbit,50us", 10, 50),
        ("25Gbit,20us", 25, 20),
        ("100 Mbit/s, 0.1 ms", 0.1, 100),
        ("1.5gbps,1ms", 1.5, 1000),
        ("56kbit,1s", 56e-6, 1e6),
        ("0.2Tbit,700ns", 200, 0.7),
        ("1Gbit,0us", 1, 0),
    ],
)
def test_links_are_understood(text, gbit, us):
    link = parse_link(text)
    assert link.bandwidth_gbit == pytest.approx(gbit)
    assert link.latency_us == pytest.approx(us)


@pytest.mark.parametrize(
    "text", ["", "fast", "10Gbit", "50us,10Gbit", "10,50", "10Gbit,50us,1", "-1Gbit,5us", "1GB/s,5us"]
)
def test_other_links_are_refused_with_an_example(text):
    with pytest.raises(UsageError, match="10Gbit,50us"):
        parse_link(text)


def test_nothing_goes_over_a_link_of_zero():
    with pytest.raises(UsageError, match="above 0"):
        parse_link("0Gbit,5us")


@pytest.mark.parametrize("step_ms", [96.0, 192.0, 500.0])
def test_one_worker_is_predicted_as_it_was_measured(step_ms: float) -> None:
    """The parts of its step add up to 192 ms, whatever its training took; another worker slows it down by a half."""
    experiment, costs = toys.experiment(train={"global_batch_size": 64}), workload().costs
    cost = BatchCost(samples=64, forward_ms=96, backward_ms=192, data_ms=0)
    slow = costs.model_copy(update={"world_size": 2, "curve": (cost,)})
    given = {"rest_ms": 0.0, "step_ms": step_ms, "backend": "gloo"}
    one, two, next_to_another = (
        predict(make_workload(experiment, costs, together=other, **given), PERFECT, workers=count)
        for other, count in ((None, 1), (None, 2), (slow, 2))
    )
    assert one.times["step_ms"] == pytest.approx(step_ms)
    assert two.times["step_ms"] == pytest.approx(step_ms / 2)
    assert next_to_another.times["step_ms"] == pytest.approx(1.5 * step_ms / 2)
