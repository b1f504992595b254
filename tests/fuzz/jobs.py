"""The fixed corpus of what callers ask of jobs and of the fleet: which there are, and how one of them stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from bottega.v1 import fleet_pb2, image_pb2
from tests.fuzz.case import INVALID, LEAST_INT32, MIB_TEXT, MOST_INT32, NOT_FOUND, Case, asking, case_of, limits, shown

_JOB_IDS = ("", "x", "\0", "../../etc/passwd", "x" * 129, MIB_TEXT, "\U0001f469\u200d\U0001f467")


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
    for index in (-1, 1, MOST_INT32, LEAST_INT32):
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
    """Yield the cases of methods that list something."""
    case = asking("ListJobs", image_pb2.ListJobsRequest)
    yield from limits(case, "page_size", (0, 1, 100), (-1, 101, MOST_INT32, LEAST_INT32))
    tokens = ("x", "AAAA", "=" * 12, "\0", "ü" * 8, "../../etc/passwd", MIB_TEXT)
    yield from limits(case, "page_token", (), tokens)
    yield from limits(case, "states", ([1, 2, 3, 4, 5],), ([0], [6], [99], [-1], [1] * 1000))
    times = [Timestamp(seconds=seconds) for seconds in (0, -62_135_596_800, 253_402_300_799)]
    no_times = [Timestamp(seconds=seconds) for seconds in (-62_135_596_801, 253_402_300_800, 2**63 - 1, -(2**63))]
    no_times += [Timestamp(nanos=nanos) for nanos in (-1, 10**9, MOST_INT32)]
    for name in ("created_after", "created_before"):
        yield from limits(case, name, (*times, Timestamp(seconds=1, nanos=999_999_999)), no_times)
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
    yield case_of("AdmitJobs", "of all kinds", admission())
    case = asking("AdmitJobs", fleet_pb2.AdmitJobsRequest)
    yield case("nothing")
    yield from limits(case, "generation", (9,), (-1,))
    records = (b"", b"\xff", b"{}", b'{"job_id":"x","fingerprint":"","spec":"/w==","created_wall":1}')
    yield from limits(case, "new_jobs", (), [[record] for record in records])
    for sequence in (0, -1, -(2**63)):
        unnumbered = fleet_pb2.StoredJob(job_id="x", sequence=sequence)
        yield case(f"a job of number {sequence}", INVALID, "stored.sequence", stored=[unnumbered])
    yield case("a NUL byte", INVALID, "stored.job_id", stored=[fleet_pb2.StoredJob(job_id="\0", sequence=1)])
    yield case("too many stored", INVALID, "stored", stored=[fleet_pb2.StoredJob(job_id="x", sequence=1)] * 1001)
    for name in ("dropped", "doubtful"):
        yield from limits(case, name, (), (["x"] * 1001,))


def _adapters_corpus() -> Iterator[Case]:
    case = asking("ListAdapters", image_pb2.ListAdaptersRequest)
    yield from limits(case, "kind", (0, 1, 2), (3, 99, -1))
    yield from limits(case, "page_size", (0, 1, 100), (-1, 101, MOST_INT32, LEAST_INT32))
    yield from limits(case, "page_token", ("1/edges/", "x", "\0", "x" * 512), ("x" * 513, MIB_TEXT))
    wrong = {"kind": 9, "page_size": -1, "page_token": "x" * 513}
    yield case("everything at once", INVALID, *wrong, **wrong)
