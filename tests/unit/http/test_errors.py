"""Errors as answers, and the limit on what one host uses."""

from __future__ import annotations

from bottega.errors import DeadlineUnmeetable, InvalidRequest, Violation
from bottega.http.errors import error_response, public_field
from bottega.http.limits import PeerLimit


def test_an_answer_that_says_when_to_retry_says_that_it_may_help() -> None:
    late = error_response(DeadlineUnmeetable("too late", metadata={"estimate_s": "7.2"}))
    assert (late.headers["retry-after"], late.headers["x-should-retry"]) == ("8", "true")
    wrong = error_response(InvalidRequest("no", violations=[Violation(field="spec.seed", description="no")]))
    assert wrong.headers["x-should-retry"] == "false"


def test_a_field_of_a_path_keeps_its_name() -> None:
    assert [public_field(name) for name in ("index", "job_id", "spec.seed")] == ["index", "job_id", "bottega.seed"]


def test_a_host_that_takes_nothing_is_not_remembered() -> None:
    limit = PeerLimit(10, 0.5)
    assert limit.take("10.0.0.7", 0)
    assert not limit._by_host
