"""The LoRA benches without their processes: how they judge what was measured."""

from __future__ import annotations

import pytest

from load.bench.addon_reference import Answer
from load.bench.addons import Drawn, Row
from load.bench.bal_quality import Quality, Seen
from load.bench.lora_trace import calls_by_tier


def test_what_was_loaded_for_a_request_came_from_the_disk_and_what_was_not_fetched_from_the_worker() -> None:
    def figures(memory: int, loaded: int, disk: int = 0) -> dict[str, float]:
        calls = {"memory": memory, "loaded": loaded, "disk": disk}
        return {f"bottega_lora_fetches_total:{tier}": count for tier, count in calls.items()}

    before = figures(5, 3)
    assert calls_by_tier(before, figures(5, 3), 2) == {"worker": 2}
    assert calls_by_tier(before, figures(6, 3), 2) == {"worker": 1, "memory": 1}
    assert calls_by_tier(before, figures(6, 4), 2) == {"memory": 1, "disk": 1}
    assert calls_by_tier(before, figures(5, 4, disk=1), 2) == {"disk": 2}


def test_the_ideal_is_diffusers_time_with_our_loras_instead_of_its_own() -> None:
    row = Row(
        theirs=[Answer(seconds=10.0, lora_s=4.0, processor_s=18.0)],
        ours=[Drawn(seconds=6.4, lora_s=0.2, processor_s=12.0)],
    )
    assert row.of_ideal == pytest.approx(6.2 / 6.4)
    assert row.speedup == pytest.approx(10 / 6.4)
    assert row.per_core == pytest.approx(1.5)
    assert row.loading_share == pytest.approx(0.4)


def test_quality_is_judged_at_the_bound_and_shown_at_every_step() -> None:
    seen = {late: Seen(ssim=1 - late / 100, clip=70 - late / 10, right=0.9) for late in (3, 6, 12)}
    quality = Quality(
        exact=Seen(ssim=1.0, clip=70.0, right=0.95), by_late=seen, none=Seen(ssim=0.4, clip=69.0, right=0.9)
    )
    rows, values = quality.reported("one", 6, 0.83, 0.1)
    assert values["ssim_one"] == pytest.approx(0.94)
    assert values["clip_drop_one"] == pytest.approx(0.6)
    assert [row[0] for row in rows[:5]] == [
        "one, exact",
        "one, from step 3",
        "one, from step 6",
        "one, from step 12",
        "one, without",
    ]
