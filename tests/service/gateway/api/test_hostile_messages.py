"""A gateway beside callers that send the largest messages that they can make: what they cost, and what is kept."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from bottega import errors
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from tests.support.flooders import Message, empty_loras, nested, tagged, unknown_fields
from tests.support.running_gateway import Running, running_gateway


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
