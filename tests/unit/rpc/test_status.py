"""Every error of the tree comes out of the wire as it went in."""

from __future__ import annotations

import grpc
import pytest

from bottega import errors
from bottega.errors import BottegaError, Violation
from bottega.rpc import status
from bottega.v1 import error_pb2


def _kinds(root: type[BottegaError]) -> list[type[BottegaError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _kinds(child))]


OWN = [kind for kind in _kinds(BottegaError) if "reason" in vars(kind)]
ON_THE_WIRE = [kind for kind in OWN if kind.reason != error_pb2.ERROR_REASON_UNSPECIFIED]


def _over_the_wire(error: BottegaError) -> grpc.aio.AioRpcError:
    wire = status.to_grpc_status(error)
    return grpc.aio.AioRpcError(
        wire.code, grpc.aio.Metadata(), grpc.aio.Metadata(*(wire.trailing_metadata or ())), details=wire.details
    )


@pytest.mark.parametrize("kind", ON_THE_WIRE)
def test_an_error_keeps_class_facts_and_violations(kind: type[BottegaError]) -> None:
    sent = kind(
        "what happened",
        metadata={"served": "miniature"},
        retry_after_s=1.25,
        violations=[Violation(field="width", description="must be a multiple of 8")],
    )
    for received in (
        status.from_rpc_error(_over_the_wire(sent)),
        status.from_job_error(status.to_job_error(sent)),
    ):
        assert type(received) is kind
        assert received.message == sent.message
        assert received.metadata == sent.metadata
        assert received.retry_after_s == pytest.approx(1.25)
        assert received.violations == sent.violations


def test_an_error_without_facts_gets_none() -> None:
    received = status.from_rpc_error(_over_the_wire(errors.JobNotFound("no such job")))
    assert (received.metadata, received.retry_after_s, received.violations) == ({}, None, ())
    assert status.from_job_error(status.to_job_error(errors.JobNotFound("x"))).retry_after_s is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlinePassed),
        (grpc.StatusCode.CANCELLED, errors.JobCancelled),
        (grpc.StatusCode.INTERNAL, errors.InternalError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.TooLarge),
        (grpc.StatusCode.UNIMPLEMENTED, errors.MethodNotServed),
    ],
)
def test_a_status_of_grpc_itself_is_typed_by_its_code(code: grpc.StatusCode, kind: type[BottegaError]) -> None:
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="says grpc")
    received = status.from_rpc_error(failure)
    assert type(received) is kind
    assert "grpc" not in received.message
    assert received.__notes__ == ["says grpc"]


def test_a_crowd_beyond_what_grpc_lets_in_hears_when_to_come_back() -> None:
    said = "Concurrent RPC limit exceeded!"
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    received = status.from_rpc_error(grpc.aio.AioRpcError(full, grpc.aio.Metadata(), grpc.aio.Metadata(), details=said))
    assert type(received) is errors.QueueFull
    assert (received.metadata, received.retry_after_s) == ({"limit": "max_calls"}, 1.0)


def test_a_reason_of_a_later_version_is_typed_by_its_code() -> None:
    job_error = error_pb2.JobError(code=14, message="later")
    job_error.reason = 999  # type: ignore[assignment]
    assert type(status.from_job_error(job_error)) is errors.Unavailable


def test_broken_details_do_not_hide_the_status() -> None:
    trailing = grpc.aio.Metadata((status.DETAILS_KEY, b"\xff\xff\xff"))
    failure = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="gone")
    assert type(status.from_rpc_error(failure)) is errors.Unavailable


def test_a_status_stays_small_enough_for_trailers() -> None:
    violations = [Violation(field=f"field_{i}", description="is wrong") for i in range(1000)]
    wire = status.to_grpc_status(errors.InvalidRequest("x" * 100_000, violations=violations))
    size = sum(len(value) for _, value in wire.trailing_metadata or ())
    assert size + len(wire.details or "") < 8 * 1024


def test_violations_that_find_no_room_are_counted() -> None:
    sent = [Violation(field=f"field_{i}", description="é" * 100) for i in range(50)]
    received = status.from_rpc_error(_over_the_wire(errors.InvalidRequest("x", violations=sent))).violations
    assert 20 < len(received) < 30
    assert list(received[:-1]) == sent[: len(received) - 1]
    left_out = len(sent) - len(received)
    assert received[-1].field == sent[len(received) - 1].field
    assert f"; {left_out} more violations" in received[-1].description


def test_a_request_can_be_told_everything_that_is_wrong_with_it() -> None:
    sent = [Violation(field=f"spec.controlnets[{i}].image", description="x" * 50) for i in range(49)]
    received = status.from_rpc_error(_over_the_wire(errors.InvalidRequest("x", violations=sent)))
    assert list(received.violations) == sent


def test_a_kind_that_somebody_has_for_himself_is_never_meant_by_its_reason() -> None:
    class Mine(errors.JobNotFound):
        """Has its reason from its parent."""

    assert type(status.from_job_error(status.to_job_error(Mine("gone")))) is errors.JobNotFound
