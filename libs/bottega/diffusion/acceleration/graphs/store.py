"""The recorded forwards of the shapes that come often: the one used longest ago goes first, within bounds."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

import torch

from bottega.diffusion.acceleration.graphs.recorded import Key, RecordedForward
from bottega.diffusion.device.memory_plan import MemoryPlan
from bottega.errors import TooLarge

_log = logging.getLogger(__name__)

# As others read it who find no room.
_HOLDER = "graphs"
# Forwards of a shape that run as they are before it is recorded, which takes as long as several of them.
_USES = 2
# Shapes whose uses are counted: callers choose them.
_MOST_COUNTED = 256


class RecordedForwards:
    """The recorded forwards of a backbone.

    Args:
        budget_bytes: Of the device's memory, that recordings may take.
        most: Recordings.
        memory: Where their bytes are set aside.
        decoded_area: Of a latent of so many elements, how many are decoded at once.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        most: int = 16,
        memory: MemoryPlan | None = None,
        decoded_area: Callable[[int], int] = lambda area: area,
    ) -> None:
        self._memory = memory or MemoryPlan()
        self._decoded_area = decoded_area
        self._budget_bytes = budget_bytes
        self._most = most
        self._recorded: OrderedDict[Key, RecordedForward] = OrderedDict()
        self._uses: Counter[Key] = Counter()
        self._refused: set[Key] = set()

    @property
    def used_bytes(self) -> int:
        """Of the device's memory."""
        return sum(each.size_bytes for each in self._recorded.values())

    def __len__(self) -> int:
        return len(self._recorded)

    def get(self, key: Key, make: Callable[[], RecordedForward]) -> RecordedForward | None:
        """That of a shape, recorded now where it has come often enough; None where its forwards run as they are."""
        known = self._recorded.get(key)
        if known is not None:
            self._recorded.move_to_end(key)
            return known
        if key in self._refused or not self._often(key):
            return None
        try:
            made = make()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._refuse(key, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None
        if made.size_bytes > self._budget_bytes:
            self._refuse(key, f"it takes {made.size_bytes >> 20} MiB of {self._budget_bytes >> 20}")
            return None
        self._recorded[key] = made
        while len(self._recorded) > self._most or self.used_bytes > self._budget_bytes or not self._set_aside(key):
            self._recorded.popitem(last=False)
        if key not in self._recorded:
            self._refuse(key, f"it takes {made.size_bytes >> 20} MiB, and forwards need what is left of the device")
            return None
        return made

    def clear(self) -> None:
        """Gives all of it back."""
        self._recorded.clear()
        self._memory.release(_HOLDER)
        self._uses.clear()
        self._refused.clear()

    def _set_aside(self, key: Key) -> bool:
        """Whether those that are recorded have room, and beside them forwards and decodings as of this one."""
        rows, _, height, width = key[0]
        try:
            self._memory.reserve(_HOLDER, self.used_bytes)
        except TooLarge:
            return False
        area = height * width
        return not self._recorded or self._memory.leaves_room(area, rows, decoded_area=self._decoded_area(area))

    def _often(self, key: Key) -> bool:
        if len(self._uses) >= _MOST_COUNTED and key not in self._uses:
            self._uses.clear()
        self._uses[key] += 1
        return self._uses[key] > _USES

    def _refuse(self, key: Key, why: str) -> None:
        if len(self._refused) >= _MOST_COUNTED:
            self._refused.clear()
        self._refused.add(key)
        _log.warning("a shape is not recorded as a graph", extra={"shape": str(key[0]), "why": why})
