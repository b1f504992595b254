"""The fixed corpus of what callers ask of jobs and of the fleet: which there are, and how one of them stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from bottega.v1 import fleet_pb2, image_pb2
from tests.fuzz.case import INVALID, NOT_FOUND, OK, Case, case_of, shown

_JOB_IDS = ("", "x", "\0", "../../etc/passwd", "x" * 129, "x" * (1 << 20), "\U0001f469\u200d\U0001f467")


def job_corpus(job_id: str) -> Iterator[Case]:
    """Of the methods for one job. job_id: as `corpus` says."""
    for method in ("GetJob", "GetJobTrace", "WatchJob", "CancelJob", "GetImage"):
        request = getattr(image_pb2, f"{method}Request")
        yield case_of(method, "a job that is there", request(job_id=job_id))
        for unknown in _JOB_IDS:
            yield case_of(method, f"no job is {shown(unknown)}", request(job_id=unknown), *_refused(unknown))
    for unknown in _JOB_IDS:
        name = f"no job is {shown(unknown)}"
        yield case_of("DeleteJob", name, image_pb2.DeleteJobRequest(job_id=unknown), *_refused(unknown))
    previewed = image_pb2.WatchJobRequest(job_id=job_id, preview=True)
    yield case_of("WatchJob", "with previews", previewed)
    yield case_of("GetImage", "as a URL", image_pb2.GetImageRequest(job_id=job_id, as_url=True))
    for index in (-1, 1, 2**31 - 1, -(2**31)):
        yield case_of("GetImage", f"image {index}", image_pb2.GetImageRequest(job_id=job_id, index=index), NOT_FOUND)


def _refused(unknown: str) -> tuple[grpc.StatusCode, *tuple[str, ...]]:
    """Return the status for an ID that no job has, and the fields that are named."""
    return (INVALID, "job_id") if "\0" in unknown else (NOT_FOUND,)


def deletion_corpus(job_id: str) -> Iterator[Case]:
    """Of DeleteJob, with a job that is there; no case after these can use it."""
    request = image_pb2.DeleteJobRequest(job_id=job_id)
    yield case_of("DeleteJob", "a job that is there", request)
    yield case_of("DeleteJob", "a job that was deleted", request)


def list_corpus() -> Iterator[Case]:
    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, **request: Any) -> Case:
        return case_of("ListJobs", name, image_pb2.ListJobsRequest(**request), code, *fields)

    for size in (0, 1, 100):
        yield case(f"page_size {size}", page_size=size)
    for size in (-1, 101, 2**31 - 1, -(2**31)):
        yield case(f"page_size {size}", INVALID, "page_size", page_size=size)
    for token in ("x", "AAAA", "=" * 12, "\0", "ü" * 8, "../../etc/passwd", "x" * (1 << 20)):
        yield case(f"page_token {shown(token)}", INVALID, "page_token", page_token=token)
    yield case("all states", states=[1, 2, 3, 4, 5])
    for state in (0, 6, 99, -1):
        yield case(f"state {state}", INVALID, "states", states=[state])
    yield case("a thousand states", INVALID, "states", states=[1] * 1000)
    for name in ("created_after", "created_before"):
        for good in (0, -62_135_596_800, 253_402_300_799):
            moment: dict[str, Any] = {name: Timestamp(seconds=good)}
            yield case(f"{name} {good} s", **moment)
        latest: dict[str, Any] = {name: Timestamp(seconds=1, nanos=999_999_999)}
        yield case(f"{name} 999999999 ns", **latest)
        for seconds in (-62_135_596_801, 253_402_300_800, 2**63 - 1, -(2**63)):
            yield case(f"{name} {seconds} s", INVALID, name, **{name: Timestamp(seconds=seconds)})
        for nanos in (-1, 10**9, 2**31 - 1):
            yield case(f"{name} {nanos} ns", INVALID, name, **{name: Timestamp(nanos=nanos)})
    both: dict[str, Any] = {name: Timestamp(nanos=-1) for name in ("created_after", "created_before")}
    yield case("everything at once", INVALID, *both, "page_size", "states", page_size=101, states=[99], **both)
    yield case_of("ListModels", "the only one", image_pb2.ListModelsRequest())
    yield from _adapters_corpus()
    yield case_of("ListMembers", "the only one", fleet_pb2.ListMembersRequest())
    yield from _admitted()


def admission() -> fleet_pb2.AdmitJobsRequest:
    """What another gateway tells of its jobs, to mutate."""
    record = b'{"job_id":"nobodys","fingerprint":"","spec":"","created_wall":1.0}'
    stored = fleet_pb2.StoredJob(job_id="stored", sequence=1, has_inputs=True)
    return fleet_pb2.AdmitJobsRequest(new_jobs=[record], stored=[stored], dropped=["nobodys"], doubtful=["x"])


def _admitted() -> Iterator[Case]:
    def case(name: str, /, *fields: str, **request: Any) -> Case:
        return case_of("AdmitJobs", name, fleet_pb2.AdmitJobsRequest(**request), INVALID, *fields)

    yield case_of("AdmitJobs", "of all kinds", admission())
    yield case_of("AdmitJobs", "nothing", fleet_pb2.AdmitJobsRequest())
    yield case_of("AdmitJobs", "a generation", fleet_pb2.AdmitJobsRequest(generation=9))
    yield case("a negative generation", "generation", generation=-1)
    for record in (b"", b"\xff", b"{}", b'{"job_id":"x","fingerprint":"","spec":"/w==","created_wall":1}'):
        yield case(f"a job that is {shown(str(record))}", "new_jobs", new_jobs=[record])
    for sequence in (0, -1, -(2**63)):
        unnumbered = fleet_pb2.StoredJob(job_id="x", sequence=sequence)
        yield case(f"a job of number {sequence}", "stored.sequence", stored=[unnumbered])
    nul = fleet_pb2.StoredJob(job_id="\0", sequence=1)
    yield case("a NUL byte", "stored.job_id", stored=[nul])
    yield case("too many stored", "stored", stored=[fleet_pb2.StoredJob(job_id="x", sequence=1)] * 1001)
    for name in ("dropped", "doubtful"):
        yield case(f"too many {name}", name, **{name: ["x"] * 1001})


def _adapters_corpus() -> Iterator[Case]:
    def case(name: str, code: grpc.StatusCode = OK, /, *fields: str, **request: Any) -> Case:
        return case_of("ListAdapters", name, image_pb2.ListAdaptersRequest(**request), code, *fields)

    for kind in (0, 1, 2):
        yield case(f"kind {kind}", kind=kind)
    for kind in (3, 99, -1):
        yield case(f"kind {kind}", INVALID, "kind", kind=kind)
    for size in (0, 1, 100):
        yield case(f"page_size {size}", page_size=size)
    for size in (-1, 101, 2**31 - 1, -(2**31)):
        yield case(f"page_size {size}", INVALID, "page_size", page_size=size)
    for token in ("1/edges/", "x", "\0", "x" * 512):
        yield case(f"page_token {shown(token)}", page_token=token)
    for token in ("x" * 513, "x" * (1 << 20)):
        yield case(f"page_token {shown(token)}", INVALID, "page_token", page_token=token)
    wrong = {"kind": 9, "page_size": -1, "page_token": "x" * 513}
    yield case("everything at once", INVALID, *wrong, **wrong)
