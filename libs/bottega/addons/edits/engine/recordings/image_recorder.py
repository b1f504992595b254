"""Records one image's activations into a new recording.

The engine asks for a row's activations each time that it tries a step, and reports when the step is done.
"""

from __future__ import annotations

from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.recordings.keys import StepKey, begins_with_noise, lacks_loras, prompt_of, step_key
from bottega.addons.edits.engine.recordings.recording import Recording
from bottega.addons.edits.engine.recordings.source import ActivationSource
from bottega.addons.edits.engine.recordings.step_access import StepRecorder
from bottega.engine.request import Request
from bottega.model.rows import Half


class ImageRecorder:
    """Records one image into a new recording. `valid`, bool [height, width], is True where it shows the template."""

    def __init__(
        self,
        source: ActivationSource,
        recording: Recording,
        request: Request,
        valid: Tensor,
        *,
        kept: frozenset[str] | None = None,
    ) -> None:
        self.lost = ""
        """Why the recording was discarded; empty if it was not."""
        self._kept = kept
        self.request = request
        self.recording = recording
        self._source = source
        self._valid = valid
        self._pending: dict[StepKey, StepRecorder] = {}

    def row(self, half: Half) -> EditActivations | None:
        """Return the activations of a row of the next step. A step that is retried may call this again."""
        if not self.lost and lacks_loras(self.request):
            self.give_up("a LoRA arrived only after the first step")
        if not self.lost and self._kept is not None and not self._kept:
            self.give_up("its activations do not fit into memory")
        if self.lost or begins_with_noise(self.request):
            return None
        sink = self._pending[step_key(self.request, half)] = StepRecorder(self._kept)
        return EditActivations(sink=sink)

    def made_step(self) -> None:
        """Add the step to the recording."""
        pending, self._pending = self._pending, {}
        # Rows of a step that did not run may be pending as well; they have no outputs.
        made = {key: sink for key, sink in pending.items() if sink.outputs}
        if self.lost or not made:
            return
        size_bytes = sum(sink.size_bytes for sink in made.values())
        if not all(sink.finite for sink in made.values()):
            self.give_up("its activations exceed the range of float16")
        elif not self._source.reserve(self.recording, self._expected(size_bytes)):
            self.give_up("its activations do not fit into memory")
        else:
            for key, sink in made.items():
                prompt = prompt_of(self.request.spec, key.half)
                self.recording.add(key, sink.outputs, self._valid, prompt=prompt)
                self._source.changed(self.recording, key)

    @property
    def next_share(self) -> float:
        """Share of the tokens that the next step computes: always 1, because recording needs all of them."""
        return 1.0

    def complete(self) -> bool:
        """Publish the recording, and return whether there is one."""
        if not self.lost and not self.recording.steps:
            self.give_up("no block was recorded")
        if not self.lost:
            self._source.complete(self.recording)
        return not self.lost

    def give_up(self, why: str) -> None:
        """Discard the recording. Later calls do nothing."""
        if not self.lost:
            self.lost = why
            self._source.abandon(self.recording)

    def _expected(self, step_bytes: int) -> int:
        """Return the expected bytes of the whole recording, computed from the step that just ended."""
        return self.recording.held_bytes + step_bytes * (1 + self.request.evaluations_left)
