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


def test_an_all_reduce_and_a_broadcast_by_hand():
    link = Link(latency_us=500, bandwidth_gbit=0.8)  # 100,000 bytes a millisecond
    assert latency_ms(link, workers=4, backend="nccl") == pytest.approx(2 * 3 * 0.5)
    assert transfer_ms(link, 4 * MB, workers=4) == pytest.approx(2 * 3 / 4 * 40)
    # Measured with workers in network namespaces, 5.2 ms one way, a hop is two messages under gloo: 20.8 ms with 2
    # workers, 62.4 ms with 4. A broadcast goes down a tree: 10.3 ms among 2, 15.6 among 4.
    link = Link(latency_us=5200, bandwidth_gbit=1)
    assert [latency_ms(link, workers=n, backend="gloo") for n in (2, 4)] == pytest.approx([20.8, 62.4])
    assert [broadcast_ms(link, 0, workers=n, backend="gloo") for n in (2, 4)] == pytest.approx([10.4, 15.6])
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

SLOW = Link(latency_us=0, bandwidth_gbit=0.8)  # 100,000 bytes a millisecond


@pytest.mark.parametrize(
    ("costs", "link", "workers", "exposed_ms"),
    [
        # Alone 64 samples take 192 ms. Two workers: 32 samples, 96 ms, then 8 MB at 100,000 bytes a ms, 80 ms.
        ({}, SLOW, 2, 80),
        ({"compression": 2}, SLOW, 2, 40),
        # Backward of 32 samples takes 64 ms. The first bucket is full after 16 and sent in 40; the second at the end.
        ({"gradients": ((4 * MB, 0.25), (MB, 1.0)), "bucket_bytes": 4 * MB}, SLOW, 2, 10),
        ({"gradients": ((4 * MB, 0.25), (MB, 1.0)), "bucket_bytes": 100 * MB}, SLOW, 2, 50),
        # Buckets wait for each other: full after 16 and 32 ms of 64; 80 ms each: the second is sent from 96 to 176.
        ({"gradients": ((8 * MB, 0.25), (8 * MB, 0.5)), "bucket_bytes": 8 * MB}, SLOW, 2, 176 - 64),
        # gloo overlaps latencies, and NCCL does not.
        ({"gradients": ((MB, 1.0),) * 4, "bucket_bytes": MB}, Link(latency_us=10_000, bandwidth_gbit=1e9), 2, 2 * 40),
        ({"gradients": ((MB, 1.0),) * 4, "bucket_bytes": MB, "backend": "nccl"},
         Link(latency_us=10_000, bandwidth_gbit=1e9), 2, 4 * 20),
        # The last of 4 micro-batches has 8 samples: 16 ms of backward to hide 80 ms behind.
        ({"gradients": ((8 * MB, 0.0),), "micro_batches": 4}, SLOW, 2, 64),
        # Buffers are broadcast before each step, 2 ms on top of the 4 of the gradients.
        ({}, Link(latency_us=1000, bandwidth_gbit=1e9), 2, 4),
        ({"buffer_bytes": 100}, Link(latency_us=1000, bandwidth_gbit=1e9), 2, 4 + 2),
    ],
)  # fmt: skip
def test_communication_is_exposed_where_backward_does_not_hide_it(costs, link, workers, exposed_ms):
    found = predict(workload(**costs), link, workers=workers)
    exactness = 1e-6 if link is SLOW else 1e-3  # the other links have a bandwidth
    assert found.times["exposed_communication_ms"] == pytest.approx(exposed_ms, rel=exactness)


@pytest.mark.parametrize(
    ("costs", "link", "workers", "speedup", "limit"),
    [
        *(({}, PERFECT, workers, workers, "compute") for workers in (1, 2, 8, 64)),
        ({}, Link(latency_us=1e12, bandwidth_gbit=100), 2, 0, "latency"),
        ({}, SLOW, 2, 192 / (96 + 80), "bandwidth"),
        ({"optimizer_ms": 64}, PERFECT, 64, (192 + 64) / (3 + 64), "batch per worker"),  # which does not scale
        ({"fixed_ms": 10}, PERFECT, 32, (10 + 192) / (10 + 6), "batch per worker"),
        ({"batch": 10}, PERFECT, 4, 10 / 3, None),  # uneven shares wait for the largest
        ({"slowdown": 1.5}, PERFECT, 2, 2 / 1.5, "contention"),
    ],
)
def test_a_speedup_has_what_limits_it(costs, link, workers, speedup, limit):
    found = predict(workload(**costs), link, workers=workers)
    assert found.speedup == pytest.approx(speedup, abs=1e-3 if speedup == 0 else 1e-6)
    assert limit in (None, found.limit)


@pytest.mark.parametrize(
    ("costs", "workers", "key", "ms"),
    [
        ({"batch": 4, "micro_batches": 4, "fixed_ms": 1.0}, 2, "compute_ms", 2 * (1 + 3)),  # more than samples
        ({"fixed_ms": 10}, 4, "compute_ms", 10 + 3 * 16),  # between the measured sizes, 1 and 64
        ({"data_ms": 1.0}, 1, "step_ms", 192 + 64),  # without loader processes
        ({"data_ms": 1.0}, 1, "data_wait_ms", 64),
        ({"data_ms": 6.0, "loader_workers": 1}, 1, "data_wait_ms", 6 * 64 - 192),  # they load meanwhile
        ({"data_ms": 6.0, "loader_workers": 2}, 1, "data_wait_ms", 0),
    ],
)
def test_a_step_by_hand(costs, workers, key, ms):
    assert predict(workload(**costs), PERFECT, workers=workers).times[key] == pytest.approx(ms)


def test_a_size_beyond_the_measured_ones():
    larger = workload(fixed_ms=10).model_copy(update={"global_batch_size": 128})
    assert predict(larger, PERFECT, workers=1).times["compute_ms"] == pytest.approx(10 + 3 * 128)


def test_a_loader_that_cannot_keep_up_is_named():
    # Loading has a constant part, which doesn't shrink with the share.
    costs = workload().costs
    curve = tuple(cost.model_copy(update={"data_ms": 150.0}) for cost in costs.curve)
    costs = costs.model_copy(update={"curve": curve})
    slow = Workload(costs=costs, optimizer_ms=0, global_batch_size=64, loader_workers=1)
    assert predict(slow, PERFECT, workers=8).limit == "loader"


def test_parts_add_up():
    costs, link = workload(optimizer_ms=3, data_ms=0.1, slowdown=1.2), Link(latency_us=100, bandwidth_gbit=1)
    found = predict(costs, link, workers=4)
    assert sum(found.times.values()) == pytest.approx(2 * found.times["step_ms"])


# Links in words


@pytest.mark.parametrize(
    ("text", "gbit", "us"),
    [
        ("10Gbit,50us", 10, 50), ("25Gbit,20us", 25, 20), ("100 Mbit/s, 0.1 ms", 0.1, 100),
        ("1.5gbps,1ms", 1.5, 1000), ("56kbit,1s", 56e-6, 1e6), ("0.2Tbit,700ns", 200, 0.7), ("1Gbit,0us", 1, 0),
    ],
)  # fmt: skip
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
