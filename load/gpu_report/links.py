"""The link to a ControlNet server: what carries it, by the worker's log, and how long a step's residuals are on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bottega.addons.controlnets.engine.messages import residuals_layout
from bottega.device_links.devices import device_links
from bottega.model.weights import DTYPES
from bottega.model_files.control_layout import read_base_layout
from bottega.transport import Backend, Deadline
from load.bench.framework import scratch
from load.gpu_report.controlnets import GROUP
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.timing import timed
from tests.support.gpu_peer import LIMITS, gpu_peer, receive, send
from tests.support.transport_backends import listening

# Of a request with guidance.
_ROWS = 2
_OPEN_S = 60.0
_LINKED = "linked to a ControlNet server"


def carried_by(rig: Rig, events: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield how many links to ControlNet servers each backend carries, by the events that the worker has logged.

    Raises RuntimeError where there is none, or, on a GPU, one that memory of the GPU does not carry.
    """
    linked = [event for event in events if event.get("event") == _LINKED]
    if not linked:
        raise RuntimeError("the worker was never linked to the ControlNet server")
    others = {f"{each['backend']} ({each['why']})" for each in linked if each["backend"] != Backend.CUDA_IPC}
    if rig.on_gpu and others:
        raise RuntimeError(f"the link to the ControlNet server is not {Backend.CUDA_IPC}: {', '.join(sorted(others))}")
    for backend, count in Counter(each["backend"] for each in linked).items():
        yield Figure(f"controlnet_links_{backend}", f"links to the server by {backend}", count)


def transfer(rig: Rig) -> Figure:
    """Time a step's residuals from one process to another, written and read: half of the way there and back."""
    device, dtype = torch.device(rig.device), DTYPES[rig.size.dtype]
    base = read_base_layout(rig.model)
    side = rig.size.side // base.latent_scale
    layout = residuals_layout(_ROWS, tuple(base.shapes(side, side)), dtype)
    tensors = [torch.randn(spec.shape, device=device).to(dtype) for spec in layout.specs[1:]]
    backend = Backend.CUDA_IPC if rig.on_gpu else Backend.MEMFD
    with scratch() as folder, listening(folder, limits=LIMITS, devices=device_links("auto", device)) as listener:
        offer = listener.offer()
        with (
            gpu_peer("echo", rig.device, backend, offer),
            listener.accept(offer, Deadline.after(_OPEN_S)) as link,
        ):

            def there_and_back(_: int) -> None:
                send(link, layout, tensors)
                receive(link, layout)

            both = timed(there_and_back, rounds=rig.size.rounds, device=rig.device)
    label = f"  a step's residuals over a link by {backend}"
    return Figure("controlnet_transfer_ms", label, both.seconds / 2 * 1e3, "ms", GROUP)
