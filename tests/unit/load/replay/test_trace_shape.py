"""Requests have the shares of the traces that they are drawn from: adapters, masks and templates."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from itertools import pairwise

import pytest

from load.replay.trace_shape import (
    CONTROLNETS,
    LORAS,
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


@pytest.mark.parametrize("trace", [*CONTROLNETS.values(), *LORAS.values()])
def test_all_of_them_take_all_calls_and_there_are_no_more(trace: AdapterCalls) -> None:
    tops = [trace.top_share(rank) for rank in range(trace.unique + 1)]
    assert (tops[0], tops[-1]) == pytest.approx((0.0, 1.0))
    assert all(more > less for less, more in pairwise(tops))
    with pytest.raises(ValueError, match=f"there are {trace.unique} of them; asked for {trace.unique + 1}"):
        trace.top_share(trace.unique + 1)
