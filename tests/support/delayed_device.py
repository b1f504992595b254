"""A CPU that behaves like a GPU: what it is given is done, and copies arrive, only when the test says so.

Results are computed at once, as all CPU tensors are; but a copy to the host is made when it arrives, so that it shows
who writes to a tensor that is on its way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from bottega.device.device import Event

# Of a thread that waits for what another one shall finish.
_MOST_WAIT_S = 30.0
STEPS = "steps"


class DelayedEvent:
    """copy: what arrives with it; None for an event alone."""

    def __init__(self, device: DelayedDevice, source: Tensor | None = None) -> None:
        self.at_s = 0.0
        self.done = False
        self._device = device
        self._source = source
        self._copy: Tensor | None = None

    @property
    def ready(self) -> bool:
        return self.done

    def wait(self) -> None:
        self._device.wait(self)

    def take(self) -> Tensor:
        self.wait()
        assert self._copy is not None, "a copy"
        return self._copy

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, DelayedEvent), "events of one device are compared"
        assert self.done, "the time of what is not done was read"
        assert earlier.done, "the time of what is not done was read"
        return self.at_s - earlier.at_s

    def finish(self) -> None:
        self.at_s = perf_counter()
        if self._source is not None:
            self._copy, self._source = self._source.clone(), None
        self.done = True


class DelayedDevice:
    """See Device. waits: how often somebody waited for what was not done. streams: by name, how often used.

    Without `running` a wait finishes what it waits for, and all before it.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.waits = 0
        self.streams: dict[str, int] = {}
        self._under_way: dict[str, deque[DelayedEvent]] = {}
        self._current = [STEPS]
        self._changed = threading.Condition()
        self._runs = False
        self._awaited = 0

    def finish(self, *streams: str) -> None:
        """All that was given to these streams so far is done; to all of them without a name."""
        with self._changed:
            for name in streams or list(self._under_way):
                under_way = self._under_way.get(name, deque())
                while under_way:
                    under_way.popleft().finish()
            self._changed.notify_all()

    @contextmanager
    def running(self, delay_s: float, *streams: str, last_is_awaited: bool = False) -> Iterator[None]:
        """In the block a thread finishes what these streams were given, each item so long after the one before.

        Args:
            last_is_awaited: Finish the last item of a stream only when somebody waits, however long this takes.
        """
        stopped = threading.Event()
        self._runs = True

        def run() -> None:
            while not stopped.wait(delay_s):
                with self._changed:
                    for name in streams or list(self._under_way):
                        items = self._under_way.get(name)
                        if items and (len(items) > 1 or not last_is_awaited or self._awaited):
                            items.popleft().finish()
                    self._changed.notify_all()

        thread = threading.Thread(target=run, name="device")
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            self._runs = False

    def wait(self, event: DelayedEvent) -> None:
        with self._changed:
            if event.done:
                return
            self.waits += 1
            if self._runs:
                self._awaited += 1
                assert self._changed.wait_for(lambda: event.done, _MOST_WAIT_S), "nobody finished it"
                self._awaited -= 1
                return
            for under_way in self._under_way.values():
                while event in under_way:
                    under_way.popleft().finish()

    def record(self) -> DelayedEvent:
        return self._given(DelayedEvent(self))

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        self.streams[name] = self.streams.get(name, 0) + 1
        self._current.append(name)
        try:
            yield
        finally:
            self._current.pop()

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, DelayedEvent)

    def to_host(self, tensor: Tensor) -> DelayedEvent:
        return self._given(DelayedEvent(self, tensor))

    def to_device(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(dtype or tensor.dtype, copy=True)

    def empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        self.waits += 1
        self.finish()

    def free_bytes(self) -> int | None:
        return None

    def total_bytes(self) -> int | None:
        return None

    def allocated_bytes(self) -> int | None:
        return None

    def limit_memory(self, size_bytes: int) -> None:
        """It is the host's."""

    def measure_peak(self, run: Callable[[], object]) -> int | None:
        run()
        self.finish()
        return None

    def _given(self, event: DelayedEvent) -> DelayedEvent:
        with self._changed:
            self._under_way.setdefault(self._current[-1], deque()).append(event)
        return event
