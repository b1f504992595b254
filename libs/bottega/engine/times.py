"""The times of a forward pass, from events of the device, and of a turn. On a GPU those are known one turn later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from bottega.device.device import Device, Event, Span


class ForwardTimes(Protocol):
    """The times of a forward pass. Reading them before they are known waits for the device."""

    @property
    def ready(self) -> bool:
        """Whether the times are known. Never waits."""
        ...

    def wait(self) -> None: ...

    @property
    def waits(self) -> Sequence[Span]:
        """Spans in which the device only waited for residuals."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds that the network took, without waiting for residuals or recorded activations."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for residuals."""
        ...

    @property
    def encoder_s(self) -> float:
        """Part of `seconds` before the first residual was needed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTimes:
    """Times that are already known, as on a CPU."""

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
        """Return at once, because the times are known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTimes:
    """Times between events of the device."""

    whole: Span
    waits: tuple[Span, ...]
    encoder: Span | None
    """The time until the first residual was needed; None if none was."""
    load_waits_s: float
    """Seconds for which the engine's thread waited for recorded activations."""

    @property
    def ready(self) -> bool:
        return self.whole.ready

    def wait(self) -> None:
        self.whole.end.wait()

    @property
    def seconds(self) -> float:
        # The thread may have waited for a load while the device was still busy.
        return max(0.0, self.whole.seconds - self.waited_s - self.load_waits_s)

    @property
    def waited_s(self) -> float:
        return sum(wait.seconds for wait in self.waits)

    @property
    def encoder_s(self) -> float:
        return 0.0 if self.encoder is None else self.encoder.seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedTimes:
    """The times of several forward passes that ran one after the other, as one."""

    parts: Sequence[ForwardTimes]

    @property
    def ready(self) -> bool:
        return all(part.ready for part in self.parts)

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    @property
    def waits(self) -> Sequence[Span]:
        return [wait for part in self.parts for wait in part.waits]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def waited_s(self) -> float:
        return sum(part.waited_s for part in self.parts)

    @property
    def encoder_s(self) -> float:
        return sum(part.encoder_s for part in self.parts)


class ForwardClock:
    """Records events of one forward pass in the device's stream. The pass begins when the clock is created."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began = device.record()
        self._blocks: Event | None = None
        self._encoder: Span | None = None
        self._waits: list[Span] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting, whether the device is idle or computes ControlNets."""
        began = self._device.record()
        yield
        self._waits.append(Span(begin=began, end=self._device.record()))

    def blocks_begin(self) -> None:
        """Record that the first block begins."""
        self._blocks = self._device.record()

    def residuals_needed(self) -> bool:
        """Record that the next block needs residuals. Return whether the encoder ends here, at the first call."""
        if self._encoder is not None:
            return False
        assert self._blocks is not None, "`blocks_begin` must be called first"
        self._encoder = Span(begin=self._blocks, end=self._device.record())
        return True

    def times(self, load_waits_s: float) -> MeasuredTimes:
        """Return the times of the forward pass, which ends now."""
        return MeasuredTimes(
            whole=Span(begin=self._began, end=self._device.record()),
            waits=tuple(self._waits),
            encoder=self._encoder,
            load_waits_s=load_waits_s,
        )


# A trial of a request's steps may take .3 s, and LoRAs' differences for text encoders 6 s. After this time of the host,
# or this share of the last step if that is more, they go on in the next turn, so that they hardly delay other steps.
_MIN_PREPARATION_S = 0.02
_PREPARATION_SHARE = 0.25


class TurnClock:
    """The time that a turn of the engine has taken so far.

    Args:
        clock: Monotonic seconds.
        is_long: See `Batcher.is_long`.
    """

    def __init__(self, device: Device, clock: Callable[[], float], *, is_long: Callable[[float], bool]) -> None:
        self._device = device
        self._clock = clock
        self._is_long = is_long
        self._began = device.record()
        self._began_s = self._step_s = 0.0

    def begin(self) -> None:
        """Begin a turn."""
        self._began, self._began_s = self._device.record(), self._clock()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Measure the step of the turn."""
        began_s = self._clock()
        yield
        self._step_s = self._clock() - began_s

    def is_long(self) -> bool:
        """Return whether this turn would delay a tenant with short turns, who is here or may come, if it went on.

        A GPU that still works on what was enqueued before is not delayed.
        """
        turn = Span(begin=self._began, end=self._device.record())
        return turn.ready and self._is_long(turn.seconds)

    def preparation_is_long(self) -> bool:
        """Return whether preparing a new job would delay the jobs that run now, if it went on.

        It is the host's time that counts, because a GPU may still be busy with the last step.
        """
        return self._clock() - self._began_s > max(_MIN_PREPARATION_S, _PREPARATION_SHARE * self._step_s)
