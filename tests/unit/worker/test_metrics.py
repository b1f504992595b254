"""What a worker's metrics say of its engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from bottega.errors import JobCancelled
from bottega.v1.device_pb2 import DeviceMemory
from bottega.v1.engine_pb2 import EngineBeat, EngineCount, EngineMetric
from bottega.v1.fleet_pb2 import Acceleration, Activity, StepTime
from bottega.v1.generation_pb2 import LoraUse, StageTime
from bottega.worker.metrics import WorkerMetrics


def test_sizes_that_the_engine_has_forgotten_leave_no_series() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    for side in range(1, 100):
        times = [StepTime(latent_height=side, latent_width=side, rows=rows, seconds=0.5) for rows in (1, 2)]
        metrics.set_beat(EngineBeat(step_times=times))
    (family,) = [family for family in registry.collect() if family.name == "bottega_worker_step_seconds"]
    assert {tuple(sample.labels.values()): sample.value for sample in family.samples} == {
        ("99x99", "1"): 0.5,
        ("99x99", "2"): 0.5,
    }


def test_waiting_and_patching_count_once_for_all_loras_of_an_attempt() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.observe_loras(
        [LoraUse(load_s=1.0, wait_s=0.25, patch_s=0.5), LoraUse(load_s=2.0, wait_s=0.25, patch_s=0.5)]
    )
    metrics.observe_loras([])
    read = {what: registry.get_sample_value(f"bottega_worker_lora_{what}_seconds_sum") for what in ("load", "wait")}
    assert read == {"load": 3.0, "wait": 0.25}
    assert registry.get_sample_value("bottega_worker_lora_patch_seconds_count") == 1


def test_a_beat_is_shown_as_counters_and_gauges() -> None:
    registry = CollectorRegistry()
    memory = DeviceMemory(
        budget_bytes=9, held_bytes={"model": 5}, host_bytes={"text_encoder_3": 4}, allocated_bytes=6, free_bytes=3
    )
    measured = [
        EngineMetric(name="bottega_worker_lora_swaps", text="Swaps.", value=1, counts=True),
        EngineMetric(name="bottega_worker_recordings", text="Templates.", value=2),
    ]
    counts = [EngineCount(kind="cache", event="late_hits", count=7)]
    metrics = WorkerMetrics(registry)
    metrics.set_beat(EngineBeat(turns=4, steps=10, metrics=measured, counts=counts, device_memory=memory))
    metrics.observe_stages([StageTime(stage="decode", seconds=seconds) for seconds in (2.0, 0.5)])
    found = {
        "worker_lora_swaps_total": 1,
        "worker_recordings": 2,
        "worker_turns_total": 4,
        "worker_turn_requests_total": 10,
        "device_budget_bytes": 9,
        "device_allocated_bytes": 6,
        "device_free_bytes": 3,
    }
    assert {name: registry.get_sample_value(f"bottega_{name}") for name in found} == found
    labelled = {
        ("device_held_bytes", "holder", "model"): 5,
        ("device_host_bytes", "holder", "text_encoder_3"): 4,
        ("worker_stage_seconds_sum", "stage", "decode"): 2.5,
        ("worker_stage_seconds_count", "stage", "decode"): 2,
    }
    for (name, label, value), expected in labelled.items():
        assert registry.get_sample_value(f"bottega_{name}", {label: value}) == expected
    event = {"kind": "cache", "event": "late_hits"}
    assert registry.get_sample_value("bottega_worker_addon_events_total", event) == 7


def test_the_fleet_is_told_of_what_ended_and_cancelled_attempts_are_no_failures() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    assert metrics.activity() == Activity()
    for outcome in ("completed", "completed", JobCancelled("").reason_name.lower(), "not_finite", "worker_lost"):
        metrics.attempt_began()
        metrics.attempt_ended(outcome)
    metrics.set_beat(EngineBeat(turns=7, steps=21))
    assert metrics.activity() == Activity(completed=2, failed=2, steps=21, turns=7)


def test_what_a_new_engine_does_not_try_leaves_no_series() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    old = [Acceleration(name="old", kept=True, speedup=1.5), Acceleration(name="graphs", kept=True, speedup=2.0)]
    metrics.set_accelerations(old)
    metrics.set_accelerations([Acceleration(name="graphs", speedup=0.5, reason="it is slower")])

    def read(name: str) -> list[float | None]:
        of = {"acceleration": name}
        return [registry.get_sample_value(f"bottega_worker_acceleration_{what}", of) for what in ("kept", "speedup")]

    assert (read("old"), read("graphs")) == ([None, None], [0.0, 0.5])
