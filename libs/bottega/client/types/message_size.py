"""Refuses what is too large for one message before it is sent, and says which images make it so."""

from __future__ import annotations

import math
from collections.abc import Iterator

from google.protobuf.message import Message

from bottega.errors import TooLarge
from bottega.rpc.channel import MAX_MESSAGE_MIB
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest, SubmitJobRequest

LIMIT = "max_message_mib"
"""metadata["limit"] of what is refused here."""

# Of a name in what is said; those that there are have less.
_MOST_LETTERS = 200


def check_size(message: Message) -> None:
    """Raises TooLarge for what no channel of ours sends, and names the images in it.

    It costs as much as sending does: of messages with images, not on the event loop.
    """
    images = list(_images(message.spec)) if isinstance(message, GenerateRequest | SubmitJobRequest) else []
    limit_bytes = MAX_MESSAGE_MIB << 20
    size_bytes = sum(size for _, size in images)
    if size_bytes <= limit_bytes:  # beyond 2 GiB, protobuf says no size
        size_bytes = message.ByteSize()
    if size_bytes > limit_bytes:
        large = ", ".join(f"{name} {_mib(size)}" for name, size in images)
        raise TooLarge(
            f"the request is {_mib(size_bytes)}, and at most {MAX_MESSAGE_MIB} MiB can be sent"
            f"{f'; its input images: {large}' if large else ''}",
            metadata={"limit": LIMIT, LIMIT: str(MAX_MESSAGE_MIB), "images": str(len(images))},
        )


def _images(spec: GenerationSpec) -> Iterator[tuple[str, int]]:
    """What each is called, and its size in bytes."""
    if spec.HasField("image"):
        yield "image", len(spec.image)
    for net in spec.controlnets:
        yield f"control image of {net.name[:_MOST_LETTERS]}", len(net.image)


def _mib(size_bytes: int) -> str:
    # Upwards: what is one byte too large must not look as if it fitted.
    return f"{math.ceil(size_bytes * 10 / 2**20) / 10:g} MiB"
