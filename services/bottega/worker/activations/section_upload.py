"""A section on its way to a store that is to record it: what it is, then its tensors in chunks, others between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.editing.recordings.keys import StepKey
from bottega.diffusion.editing.recordings.recording import Recording
from bottega.diffusion.editing.recordings.step import RecordedStep
from bottega.sections import SectionLayout, messages
from bottega.sections.pieces import SectionChunks
from bottega.transport import Connection, Link
from bottega.v1.activations_pb2 import SectionHeader
from bottega.worker.activations.template import pack_map, section_key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSection:
    """A step as it was when it was given: its map and prompt may change."""

    recording: Recording
    key: StepKey
    step: RecordedStep
    valid: Tensor
    prompt: str

    @property
    def size_bytes(self) -> int:
        """Of its tensors."""
        return self.step.size_bytes

    @property
    def header(self) -> SectionHeader:
        """What the store is told of it."""
        height, width = self.recording.shape
        return SectionHeader(
            recording=self.recording.id,
            key=self.recording.key.digest,
            section=section_key(self.key),
            prompt=self.prompt,
            map=pack_map(self.valid),
            latent_height=height,
            latent_width=width,
        )


class SectionUpload:
    """number: of its messages. Raises ValueError for a section that no message has room for."""

    def __init__(self, number: int, section: RecordedSection) -> None:
        self.section = section
        tensors = {name: tensor for name in section.step.names if (tensor := section.step.get(name)) is not None}
        layout = SectionLayout.of((name, tensor.shape) for name, tensor in tensors.items())
        self._message = messages.section_message(number, section.header, layout)
        self._chunks = SectionChunks(number, layout, [bytes_of(tensor) for tensor in tensors.values()])
        self._begun = False

    @property
    def done(self) -> bool:
        """Whether all was sent."""
        return self._chunks.done

    def send(self, connection: Connection, link: Link, most_bytes: int) -> int:
        """Sends what comes next, at most so many bytes of tensors; returns how many. Raises what sending does."""
        if not self._begun:
            self._begun = True
            connection.send_now(link, self._message)
            return 0
        return self._chunks.send(link, most_bytes)


def bytes_of(tensor: Tensor) -> memoryview:
    """Its elements, row-major."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
