"""The fleet as the SDK returns it: typed values of what the gateway lists."""

from __future__ import annotations

import pytest

from bottega import kinds
from bottega.client import AttemptProgress, Readiness, ServiceLoad, ServiceStart
from bottega.client.types.fleet import fleet_from
from bottega.errors import InternalError
from bottega.v1.fleet_pb2 import ListMembersResponse, Load, Member, Registration, RunningAttempt, StartProgress
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED, Hosted, ResidualProfile
from bottega.v1.worker_pb2 import AttemptId


def test_a_service_has_its_load_and_what_it_hosts() -> None:
    net = Hosted(kind=kinds.CONTROLNET, name="edges", state=HOSTED_STATE_LOADED, sessions=2)
    net.profiles.append(ResidualProfile(model_hash="ab", num_inference_steps=20, similarity=0.5))
    running = RunningAttempt(attempt=AttemptId(job_id="job-1", number=1), steps_left=3)
    load = Load(running=[running], memory_bytes=7, hosted=[net, Hosted(state=99)])  # type: ignore[arg-type]
    worker = Member(registration=Registration(kind=kinds.WORKER, name="w0", address="here:1"), load=load, joined_s=2.0)
    worker.registration.models.add(name="miniature", default_steps=20)
    status = fleet_from(ListMembersResponse(members=[worker], queued=4, longest_wait_s=1.5))
    (member,) = status.of_kind(kinds.WORKER)
    assert (status.queued, status.longest_wait_s, status.of_kind(kinds.CACHE)) == (4, 1.5, ())
    assert (member.name, member.address, member.joined_s, member.reported) == ("w0", "here:1", 2.0, True)
    assert [(model.name, model.default_steps) for model in member.models] == [("miniature", 20)]
    assert member.load.running == (AttemptProgress(job_id="job-1", steps_left=3),)
    edges, unknown = member.load.hosted
    assert (edges.name, edges.readiness, edges.sessions, edges.profiles[0].similarity) == (
        "edges",
        Readiness.LOADED,
        2,
        0.5,
    )
    assert unknown.readiness is Readiness.UNKNOWN


def test_a_service_that_has_not_reported_or_still_starts_says_so() -> None:
    silent = Member(registration=Registration(kind=kinds.LORAS, name="loras"))
    starting = Member(load=Load(starting=StartProgress(stage="loading unet", done_bytes=1, total_bytes=2)))
    first, second = fleet_from(ListMembersResponse(members=[silent, starting])).members
    assert (first.load, first.reported, first.starting) == (ServiceLoad(), False, None)
    assert second.starting == ServiceStart(stage="loading unet", done_bytes=1, total_bytes=2)


def test_a_list_that_no_fleet_has_is_refused() -> None:
    with pytest.raises(InternalError, match="more than 4,096 services"):
        fleet_from(ListMembersResponse(members=[Member()] * 5000))
