"""Requests have the shares of the traces that they are drawn from: adapters, masks and templates."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from itertools import pairwise

import pytest

from load.replay.mask_ratios import TRACES, MaskRatios
from load.replay.template_popularity import EDITS, TemplatePopularity
from load.replay.trace_shape import (
    CONTROLNETS,
    CONTROLNETS_A,
    CONTROLNETS_B,
    LORAS,
    LORAS_A,
    LORAS_B,
    AdapterCalls,
)

_LORAS = 500


@pytest.mark.parametrize("trace", [*CONTROLNETS.values()], ids=[*CONTROLNETS])
def test_calls_have_the_shares_of_the_trace(trace: AdapterCalls) -> None:
    assert sum(trace.shares()) == pytest.approx(1)
    assert all(more > less - 1e-5 for more, less in pairwise(trace.shares()))
    drawn = list(itertools.islice(trace.calls(random.Random(0)), 20_000))
    calls = Counter(rank for ranks in drawn for rank in ranks)
    top = sum(calls[rank] for rank in range(5)) / calls.total()
    assert top == pytest.approx(trace.top_share(5), abs=0.01)
    assert min(map(len, drawn)) == 1


@pytest.mark.parametrize("trace", [*LORAS.values()], ids=[*LORAS])
def test_requests_for_loras_have_the_shares_of_the_trace(trace: AdapterCalls) -> None:
    shares = trace.shares(_LORAS)
    assert len(shares) == _LORAS
    assert sum(shares) == pytest.approx(1)
    drawn = list(itertools.islice(trace.draw(random.Random(0), count=_LORAS), 20_000))
    assert all(len(set(ranks)) == len(ranks) >= 1 for ranks in drawn)
    two = sum(len(ranks) == 2 for ranks in drawn) / len(drawn)
    assert two == pytest.approx(trace.per_request[2] / (1 - trace.per_request[0]), abs=0.01)
    singles = Counter(ranks[0] for ranks in drawn)  # the first one is drawn without regard to another
    top = sum(singles[rank] for rank in range(24)) / singles.total()
    assert top == pytest.approx(trace.top_share(24) / trace.top_share(_LORAS), abs=0.02)


@pytest.mark.parametrize("trace", [*CONTROLNETS.values(), *LORAS.values()])
def test_as_many_requests_use_none_one_or_several_as_in_the_trace(trace: AdapterCalls) -> None:
    drawn = Counter(map(len, itertools.islice(trace.draw(random.Random(1), least=0), 20_000)))
    shares = {count: drawn[count] / drawn.total() for count in drawn}
    assert shares == pytest.approx(trace.per_request, abs=0.01)


def test_of_one_adapter_no_request_uses_two() -> None:
    assert set(itertools.islice(CONTROLNETS_B.draw(random.Random(1), count=1), 100)) == {(0,)}


def test_the_traces_say_what_they_are_quoted_for() -> None:
    assert round(100 * CONTROLNETS_A.top_share(5), 1) == 97.6
    assert round(100 * CONTROLNETS_B.top_share(8), 1) == 94.5
    quoted = [
        (LORAS_A, {3: 9.3, 24: 30.1, 146: 49.8, 1105: 75.7, 4501: 95.7}),
        (LORAS_B, {2: 26.6, 13: 52.5, 172: 75.7, 4501: 97.8}),
    ]
    for trace, shares in quoted:
        assert {rank: round(100 * trace.top_share(rank), 1) for rank in shares} == shares


@pytest.mark.parametrize("trace", [*CONTROLNETS.values(), *LORAS.values()])
def test_all_of_them_take_all_calls_and_there_are_no_more(trace: AdapterCalls) -> None:
    tops = [trace.top_share(rank) for rank in range(trace.unique + 1)]
    assert (tops[0], tops[-1]) == pytest.approx((0.0, 1.0))
    assert all(more > less for less, more in pairwise(tops))
    with pytest.raises(ValueError, match=f"there are {trace.unique} of them; asked for {trace.unique + 1}"):
        trace.top_share(trace.unique + 1)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_masks_of_a_trace_have_its_average(trace: MaskRatios) -> None:
    shares = list(itertools.islice(trace.draw(random.Random(1)), 20_000))
    assert sum(shares) / len(shares) == pytest.approx(trace.mean, rel=0.03)
    assert all(0 < share < 1 for share in shares)


def test_popular_templates_take_most_edits_and_none_is_rare() -> None:
    popularity = TemplatePopularity()
    shares = popularity.shares()
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert sum(shares[:10]) == pytest.approx(0.39, abs=0.01)
    assert shares[-1] * EDITS == pytest.approx(4_700, rel=0.01)
    drawn = list(itertools.islice(TemplatePopularity(count=50).draw(random.Random(1)), 20_000))
    assert drawn.count(0) / len(drawn) == pytest.approx(TemplatePopularity(count=50).shares()[0], rel=0.1)
    assert set(drawn) == set(range(50))
