"""A gateway beside callers that send the largest messages that they can make: what they cost, and what is kept."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from bottega import errors
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2, webhook_pb2, webhook_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.support.flooders import Message, empty_loras, nested, tagged, unknown_fields
from tests.support.running_gateway import Running, refusal, running_gateway


async def _refusal(gateway: Running, message: Message) -> errors.BottegaError:
    method, raw = message
    ask: Any = gateway.channel.unary_unary(method)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(raw, timeout=20)
    return from_rpc_error(caught.value)


async def test_messages_that_would_expand_are_refused_before_they_are_parsed() -> None:
    async with running_gateway() as gateway:
        for message in (empty_loras(3 << 20), nested()):
            refused = await _refusal(gateway, message)
            assert type(refused) is errors.TooLarge
            assert refused.metadata == {"limit": "fields", "fields": "1024"}


async def test_an_id_with_a_nul_byte_is_refused() -> None:
    odd = "a\0b"
    async with running_gateway() as gateway:
        await gateway.worker()
        operators: Any = webhook_pb2_grpc.WebhookServiceStub(gateway.fleet_channel)
        spec = GenerationSpec(prompt="a star")
        calls: list[tuple[str, Any, Any]] = [
            ("request_id", gateway.images.SubmitJob, image_pb2.SubmitJobRequest(request_id=odd, spec=spec)),
            ("request_id", gateway.images.Generate, image_pb2.GenerateRequest(request_id=odd, spec=spec)),
            ("job_id", gateway.images.GetJob, image_pb2.GetJobRequest(job_id=odd)),
            ("job_id", gateway.images.WatchJob, image_pb2.WatchJobRequest(job_id=odd)),
            ("job_id", gateway.images.GetImage, image_pb2.GetImageRequest(job_id=odd)),
            ("job_id", gateway.images.CancelJob, image_pb2.CancelJobRequest(job_id=odd)),
            ("job_id", gateway.images.DeleteJob, image_pb2.DeleteJobRequest(job_id=odd)),
            ("job_id", gateway.images.GetJobTrace, image_pb2.GetJobTraceRequest(job_id=odd)),
            (
                "event_ids",
                operators.ReplayWebhookEvents,
                webhook_pb2.ReplayWebhookEventsRequest(event_ids=[odd]),
            ),
        ]
        for field, method, request in calls:
            refused = await refusal(lambda method=method, request=request: method(request, timeout=20))  # type: ignore[misc]
            assert (type(refused), [one.field for one in refused.violations]) == (errors.InvalidRequest, [field])


async def test_fields_that_nobody_knows_are_stored_nowhere_and_lists_go_on() -> None:
    size_bytes = 6 << 20
    async with running_gateway() as gateway:
        await gateway.worker()
        method, raw = unknown_fields(size_bytes)
        # In the request, in its spec, and in a message of that.
        deep = tagged(
            2, GenerationSpec(prompt="a star").SerializeToString() + tagged(21, tagged(900, bytes(size_bytes)))
        )
        for request in (raw, deep, deep + tagged(901, bytes(size_bytes))):
            submit: Any = gateway.channel.unary_unary(method)
            answer = image_pb2.SubmitJobResponse.FromString(await submit(request, timeout=20))
            done = await gateway.ended(answer.job.job_id)
            assert answer.ByteSize() < 4096
            assert done.ByteSize() < 16_384
        listed = await gateway.images.ListJobs(image_pb2.ListJobsRequest(page_size=100), timeout=20)
        assert len(listed.jobs) == 3
        assert listed.ByteSize() < 3 * 16_384
