"""The fixed corpus: every field of every request at its limits and one past, each with the answer that it must get.

Puts together what the files beside it know of single methods, and knows what is no message at all; sends nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import grpc

from tests.fuzz.activations import activation_corpus
from tests.fuzz.attempts import attempt_corpus
from tests.fuzz.cache import cache_corpus
from tests.fuzz.case import INVALID, Case
from tests.fuzz.controlnets import controlnet_corpus
from tests.fuzz.drawings import drawing_corpus
from tests.fuzz.jobs import deletion_corpus, job_corpus, list_corpus
from tests.fuzz.joining import joining_corpus
from tests.fuzz.links import link_corpus
from tests.fuzz.lora_store import lora_store_corpus
from tests.fuzz.webhooks import webhook_corpus
from tests.support.flooders import empty_loras, large_id, nested

# One past what a message may have: a caller's, and an attempt's.
_TOO_LARGE_BYTES = (24 << 20) + 1
TOO_LARGE_BYTES = (50 << 20) + 1
_MIB = 1 << 20


def corpus(job_id: str, digest: str, lora_digest: str) -> Iterator[Case]:
    """All cases, those of the job first; the last one deletes it.

    job_id: of a job that has completed, with one picture. digest: of the ControlNet that the ControlNet server hosts.
    lora_digest: of the LoRA store's "ink".
    """
    yield from job_corpus(job_id)
    yield from drawing_corpus()
    yield from list_corpus()
    yield from webhook_corpus()
    yield from joining_corpus()
    yield from attempt_corpus()
    yield from controlnet_corpus(digest)
    yield from lora_store_corpus(lora_digest)
    yield from cache_corpus()
    yield from activation_corpus()
    yield from link_corpus()
    yield from _bytes()
    yield from deletion_corpus(job_id)


def _bytes() -> Iterator[Case]:
    """What is no message at all."""
    surrogate = b"\n\x03\xed\xa0\x80"  # a lone surrogate, as if UTF-8 had any, in the first field
    jobs = ("GetJob", "GetJobTrace", "CancelJob", "DeleteJob", "WatchJob", "GetImage")
    texts = (*jobs, "Generate", "SubmitJob", "OpenLink", "AddControlNet")
    stored = ("DropStoredTemplate", "PinTemplate", "WarmTemplate", "PrefetchTemplates")
    for method in (*texts, *stored, "GetCacheEntry", "ListCacheEntries", "ClearCache"):
        yield Case(method=method, name="a lone surrogate", raw=(surrogate,), code=INVALID)
    nets = ("Prefetch", "ListControlNets", "SetProfile", "PinControlNet")
    methods = (
        *texts,
        *nets,
        "ListJobs",
        "ListModels",
        "ListAdapters",
        "ListMembers",
        "AdmitJobs",
        "ListWebhookEvents",
        "ReplayWebhookEvents",
        "Join",
        "RunAttempt",
        "CancelAttempt",
    )
    cache = ("GetCacheStats", "GetCacheEntry", "ListCacheEntries", "ClearCache", "ListCacheProfiles", "SetCacheProfile")
    worker = ("ListAttempts", "WatchCheckpoints", "PreviewAttempt", "DropTemplate", "ListTemplates", "ProfileBlocks")
    activations = (*stored, "ListStoredTemplates", "ListBlockProfiles", "SetBlockProfile")
    for method in (*methods, *worker, *cache, *activations):
        yield Case(method=method, name="no message", raw=(b"\xff" * 9,), code=INVALID)
        yield Case(method=method, name="a length beyond the end", raw=(b"\n" + struct.pack("<B", 99),), code=INVALID)
    for method, size_bytes in (("SubmitJob", _TOO_LARGE_BYTES), ("RunAttempt", TOO_LARGE_BYTES)):
        huge = bytes(size_bytes)
        yield Case(method=method, name="beyond the limit", raw=(huge,), code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    for name, (path, raw) in (("a million empty messages", empty_loras(_MIB)), ("messages in messages", nested(_MIB))):
        for method in (path.rpartition("/")[2], "Generate"):
            yield Case(method=method, name=name, raw=(raw,), code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    for method in ("GetJob", "ListJobs"):
        yield Case(method=method, name="large", raw=(large_id(3 * _MIB)[1],), code=grpc.StatusCode.RESOURCE_EXHAUSTED)
