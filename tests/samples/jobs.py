"""Jobs of the gateway on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.addons.interface.views import JobRequest
from bottega.gateway.jobs.job import Job
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec
from bottega.v1.image_pb2 import PRIORITY_NORMAL, Priority
from tests.fakes.fake_time import FakeTime


def publish_end(job: Job) -> None:
    """What was decided of the job is durable: it has ended."""
    assert job.outcome is not None
    job.finish(job.outcome)


def sample_job(
    time: FakeTime | None = None,
    *,
    request_id: str = "",
    size_bytes: int = 0,
    controlnets: Sequence[str] = (),
    tenant: str = "",
    priority: Priority.ValueType = PRIORITY_NORMAL,
    steps: int = 10,
) -> Job:
    """A queued job of the model "m": one image, with an input image and ControlNets of these names."""
    nets = [ControlNet(name=name) for name in controlnets]
    bare = GenerationSpec(model="m", num_inference_steps=steps, num_images=1, controlnets=nets)
    spec = GenerationSpec(model="m", num_inference_steps=steps, num_images=1, image=b"input", controlnets=nets)
    clock = (time or FakeTime()).clock()
    return Job(
        clock=clock,
        spec=spec,
        bare=bare,
        request=JobRequest(
            fingerprint="f",
            shape=(16, 16),
            request_id=request_id,
            size_bytes=size_bytes,
            tenant=tenant,
            priority=priority,
        ),
    )
