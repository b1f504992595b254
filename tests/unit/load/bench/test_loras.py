"""The LoRA benches without their processes: what they draw from the trace, and how they judge what was measured."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from itertools import pairwise

import pytest

from load.bench.addon_reference import Answer
from load.bench.addons import Drawn, Row
from load.bench.bal_quality import Quality, Seen
from load.bench.lora_trace import calls_by_tier
from load.bench.trace_shape import LORAS_A, LORAS_B, LoraCalls

_COUNT = 500


@pytest.mark.parametrize("trace", [LORAS_A, LORAS_B], ids=["A", "B"])
def test_requests_for_loras_have_the_shares_of_the_trace(trace: LoraCalls) -> None:
    shares = trace.shares(_COUNT)
    assert len(shares) == _COUNT
    assert sum(shares) == pytest.approx(1)
    drawn = list(itertools.islice(trace.draw(_COUNT, random.Random(0)), 20_000))
    assert all(len(set(ranks)) == len(ranks) >= 1 for ranks in drawn)
    two = sum(len(ranks) == 2 for ranks in drawn) / len(drawn)
    assert two == pytest.approx(trace.per_request[2] / (1 - trace.per_request[0]), abs=0.01)
    singles = Counter(ranks[0] for ranks in drawn)  # the first one is drawn without regard to another
    top = sum(singles[rank] for rank in range(24)) / singles.total()
    assert top == pytest.approx(trace.top_share(24) / trace.top_share(_COUNT), abs=0.02)


def test_the_traces_long_tail_is_what_it_is_quoted_for() -> None:
    quoted = [(LORAS_A, {3: 9.3, 24: 30.1, 146: 49.8}), (LORAS_B, {2: 26.6, 13: 52.5, 172: 75.7})]
    for trace, shares in quoted:
        assert {rank: round(100 * trace.top_share(rank), 1) for rank in shares} == shares
        assert all(more > less for less, more in pairwise(trace.top_share(rank) for rank in range(_COUNT)))
        with pytest.raises(ValueError, match="ends at rank 643"):
            trace.top_share(644)


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
