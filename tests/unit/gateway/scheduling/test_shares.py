"""Which tenants may have more run, by what runs already."""

from __future__ import annotations

import pytest

from bottega.gateway.scheduling.line import equal_weights
from bottega.gateway.scheduling.shares import RunningShares

HEAVY = {"heavy": 3.0, "light": 1.0}


def _claims(shares: RunningShares, tenant: str) -> int:
    """How many jobs it may have more."""
    return next(count for count in range(100) if not shares.claim(tenant))


def test_a_tenant_alone_has_no_share_to_claim() -> None:
    assert not RunningShares({}, ("",), equal_weights).claim("")
    assert not RunningShares({"a": 3}, ("a",), equal_weights).claim("a")


@pytest.mark.parametrize(("running", "more"), [(1, 1), (2, 2), (10, 10)])
def test_of_equal_tenants_each_may_have_as_much_as_the_other(running: int, more: int) -> None:
    shares = RunningShares({"flood": running}, ("flood", "one"), equal_weights)
    assert not shares.claim("flood")
    assert _claims(shares, "one") == more


def test_shares_are_by_weight_and_of_those_alone_who_have_jobs() -> None:
    assert _claims(RunningShares({"light": 2}, ("heavy",), HEAVY.__getitem__), "heavy") == 6
    assert _claims(RunningShares({"heavy": 6}, ("light",), HEAVY.__getitem__), "light") == 2
    assert not RunningShares({"heavy": 2}, ("light",), HEAVY.__getitem__).claim("light")


def test_no_more_of_a_tenant_begins_than_may_run() -> None:
    left = {"bounded": 2, "full": 0}
    shares = RunningShares({}, ("bounded", "full", "free"), equal_weights, left.get)
    assert [shares.begin("bounded") for _ in range(4)] == [True, True, False, False]
    assert not shares.begin("full")
    assert all(shares.begin("free") for _ in range(50))


def test_a_tenant_of_which_nothing_runs_is_told_apart_until_it_has_begun_one() -> None:
    shares = RunningShares({"flood": 3}, ("flood", "one"), equal_weights)
    assert (shares.has_none("one"), shares.has_none("flood")) == (True, False)
    assert shares.claim("one")
    assert not shares.has_none("one")
    assert not RunningShares({}, ("one",), equal_weights).has_none("one"), "nobody else has any"
