"""What a forward took, by events of the device: known when it has got there, which on a GPU is a turn later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from bottega.diffusion.device.device import Device, Event
from bottega.diffusion.device.span import Span


class ForwardTimes(Protocol):
    """The times of a forward. What is read before it is ready waits for the device."""

    @property
    def ready(self) -> bool:
        """Whether they are known. Never waits."""
        ...

    def wait(self) -> None:
        """Until they are."""
        ...

    @property
    def waits(self) -> Sequence[Span]:
        """In which the device had nothing to do but to wait for residuals."""
        ...

    @property
    def seconds(self) -> float:
        """That the network took, without waiting for residuals, or for what was on its way from recordings."""
        ...

    @property
    def waited_s(self) -> float:
        """For residuals."""
        ...

    @property
    def encoder_s(self) -> float:
        """What of `seconds` went by before the first of them was needed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTimes:
    """Times that are known."""

    seconds: float
    waited_s: float = 0.0
    encoder_s: float = 0.0

    @property
    def ready(self) -> bool:
        return True

    @property
    def waits(self) -> Sequence[Span]:
        return ()

    def wait(self) -> None:
        """They are known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTimes:
    """whole: of the forward. waits: in it, in which the device had nothing to do. encoder: None without residuals.

    load_waits_s: that the thread has waited for recordings.
    """

    whole: Span
    waits: tuple[Span, ...]
    encoder: Span | None
    load_waits_s: float

    @property
    def ready(self) -> bool:
        return self.whole.ready

    def wait(self) -> None:
        self.whole.end.wait()

    @property
    def seconds(self) -> float:
        # The thread may have waited for a load while the device was still at work.
        return max(0.0, self.whole.seconds - self.waited_s - self.load_waits_s)

    @property
    def waited_s(self) -> float:
        return sum(wait.seconds for wait in self.waits)

    @property
    def encoder_s(self) -> float:
        return 0.0 if self.encoder is None else self.encoder.seconds


class ForwardClock:
    """Marks one forward's moments in the device's stream; it begins now."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began = device.record()
        self._blocks: Event | None = None
        self._encoder: Span | None = None
        self._waits: list[Span] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts to the waits what the device idles in the block, or computes there for ControlNets."""
        began = self._device.record()
        yield
        self._waits.append(Span(begin=began, end=self._device.record()))

    def blocks_begin(self) -> None:
        """The first block is next."""
        self._blocks = self._device.record()

    def residuals_needed(self) -> None:
        """The next block needs some. The first time ends the encoder."""
        if self._encoder is None:
            assert self._blocks is not None, "blocks have begun"
            self._encoder = Span(begin=self._blocks, end=self._device.record())

    def times(self, load_waits_s: float) -> MeasuredTimes:
        """The forward ends now."""
        return MeasuredTimes(
            whole=Span(begin=self._began, end=self._device.record()),
            waits=tuple(self._waits),
            encoder=self._encoder,
            load_waits_s=load_waits_s,
        )
