"""What a field of the contract cannot hold is refused in our words, by the argument's name."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from bottega.client.types.messages import build_message, set_field, set_timestamp
from bottega.errors import InvalidRequest
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec
from bottega.v1.image_pb2 import GetJobRequest, WatchJobRequest
from tests.support.terminal import NO_UNICODE


def rule(message: Any, name: str, value: object) -> str:
    (violation,) = set_field(message, name, value)
    assert violation.field == name
    return violation.description


@pytest.mark.parametrize("value", [-1, 1.5, "7", pytest.param(10**5000, id="huge")])
def test_a_number_is_refused_with_its_range(value: object) -> None:
    said = rule(GenerationSpec(), "seed", value)
    assert said.startswith("must be a whole number, 0 to 9007199254740984; got ")
    assert len(said) < 150


@pytest.mark.parametrize(
    ("message", "name", "value", "said"),
    [
        (GenerationSpec(), "guidance_scale", 10**400, "must be a number, 0 to 50; got 1000"),
        (GetJobRequest(), "job_id", NO_UNICODE, r"must be Unicode text, which UTF-8 can carry; got 'a\udcff'"),
        (GetJobRequest(), "job_id", None, "must be text; got None"),
        (WatchJobRequest(), "preview", "yes", "must be True or False; got 'yes'"),
        (ControlNet(), "image", "x", "must be bytes; got 'x'"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_a_field_cannot_hold_is_refused(message: Any, name: str, value: object, said: str) -> None:
    assert rule(message, name, value).startswith(said)


def test_all_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"page_size: .* \(and 1 more\)") as refused:
        build_message(image_pb2.ListJobsRequest(), page_size=10**12, page_token=7)
    assert [violation.field for violation in refused.value.violations] == ["page_size", "page_token"]


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        (datetime(2026, 1, 2), "must be a datetime with a time zone; got 2026-01-02T00:00:00"),  # noqa: DTZ001
        ("yesterday", "must be a datetime with a time zone; got 'yesterday'"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=5))), "must be a time in the years 1 to 9999, in UTC"),
    ],
)
def test_a_moment_has_a_time_zone(moment: object, said: str) -> None:
    (violation,) = set_timestamp(Timestamp(), moment, path="created_after")
    assert violation.field == "created_after"
    assert violation.description.startswith(said)
