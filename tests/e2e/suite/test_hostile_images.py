"""Images that are long to decode hold up nobody but who sends them: refused at once, or decoded beside the others."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator

import grpc
import PIL.Image
import pytest

from bottega.errors import BadImage, FieldNotServed, QueueFull
from bottega.rpc.status import from_rpc_error
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import CancelJobRequest, SubmitJobRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.e2e.conftest import Suite
from tests.samples import hostile_images as hostile

# Those who send them, all at once: more than there are codec processes.
SENDERS = 6
REQUESTS = 12
# One of these images alone took the codec 4 to 23 s, and there are thousands of requests in a minute.
MOST_S = 4.0


def spec_of(image: bytes, mask: bytes | None = None) -> GenerationSpec:
    return GenerationSpec(prompt="a star", num_inference_steps=1, image=image, strength=1.0, mask_image=mask)


def sent_s(images: ImageServiceStub, image: bytes) -> float:
    """Seconds in which an ordinary job with an image is acknowledged."""
    began = time.monotonic()
    job = images.SubmitJob(SubmitJobRequest(spec=spec_of(image)), timeout=30).job
    took_s = time.monotonic() - began
    images.CancelJob(CancelJobRequest(job_id=job.job_id), timeout=30)
    return took_s


def refused_as(images: ImageServiceStub, spec: GenerationSpec) -> type[BaseException]:
    with pytest.raises(grpc.RpcError) as raised:
        images.SubmitJob(SubmitJobRequest(spec=spec), timeout=60)
    return type(from_rpc_error(raised.value))


@contextlib.contextmanager
def flood(images: ImageServiceStub, specs: list[GenerationSpec]) -> Iterator[set[type[BaseException]]]:
    """In the block, several send these in turn without a pause. Yields what they were told, so far."""
    over = threading.Event()
    told: set[type[BaseException]] = set()

    def send(first: int) -> None:
        turn = first
        while not over.is_set():
            told.add(refused_as(images, specs[turn % len(specs)]))
            turn += 1

    senders = [threading.Thread(target=send, args=(number,)) for number in range(SENDERS)]
    for sender in senders:
        sender.start()
    try:
        time.sleep(0.5)  # they are under way
        yield told
    finally:
        over.set()
        for sender in senders:
            sender.join(90)


@pytest.mark.alone
@pytest.mark.slow
def test_hostile_images_beside_ordinary_requests_delay_them_little(suite: Suite, images: ImageServiceStub) -> None:
    good = hostile.saved(PIL.Image.effect_noise((64, 64), 90).convert("RGB"))
    refused = [
        hostile.scans(9000, refine=True),
        hostile.exif_segments(500_000, 2),
        hostile.compressed_texts(7900),
        hostile.colour_profiles(7900),
    ]
    large = [hostile.scans(32, refine=True), hostile.png_of(4096, 4096)]  # as much work as one image may be
    sent_s(images, good)
    alone_s = [sent_s(images, good) for _ in range(REQUESTS)]
    # A mask is served by nobody here, which is said when both images have been looked at.
    specs = [spec_of(image) for image in refused] + [spec_of(image, image) for image in large]
    with flood(images, specs) as told:
        beside_s = [sent_s(images, good) for _ in range(REQUESTS)]
    assert {BadImage} < told <= {BadImage, FieldNotServed, QueueFull}
    beside, alone = statistics.median(beside_s), statistics.median(alone_s)
    print(f"alone {alone:.3f} s, beside {beside:.3f} s, worst {max(beside_s):.3f} s")
    assert max(beside_s) < MOST_S
    assert suite.gateway.process.poll() is None
    replaced = [
        event for event in suite.gateway.events() if event.get("event") == "a child process was lost during a call"
    ]
    assert not replaced, "a process was ended: something took as long as it could"
