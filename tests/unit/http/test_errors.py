"""Errors as answers, and the limit on what one host uses."""

from __future__ import annotations

from bottega.errors import DeadlinePassed, DeadlineUnmeetable, InvalidRequest, QueueFull, Violation
from bottega.http.errors import error_response, public_field
from bottega.http.limits import PeerLimit


def test_an_answer_has_the_status_of_its_error_and_says_whether_to_retry() -> None:
    for error, status, retry in (
        (DeadlinePassed("too late"), 504, (None, "false")),
        (DeadlineUnmeetable("too late", metadata={"estimate_s": "7.2"}), 429, ("8", "true")),
        (QueueFull("full", retry_after_s=0.4), 429, ("1", "true")),
        (InvalidRequest("no", violations=[Violation(field="spec.seed", description="no")]), 400, (None, "false")),
    ):
        answer = error_response(error)
        assert answer.status_code == status
        assert (answer.headers.get("retry-after"), answer.headers["x-should-retry"]) == retry


def test_a_field_of_a_path_keeps_its_name() -> None:
    assert [public_field(name) for name in ("index", "job_id", "spec.seed")] == ["index", "job_id", "bottega.seed"]


def test_a_host_that_takes_nothing_is_not_remembered() -> None:
    limit = PeerLimit(10, 0.5)
    assert limit.take("10.0.0.7", 0)
    assert not limit._by_host
