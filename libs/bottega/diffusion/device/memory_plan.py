"""One budget for all that a device's memory holds: who has how much of it, and what a picture needs beside them.

What forwards and decodings need is measured once and is in proportion to the elements of the latents that they work on;
attention takes no more than that in any of torch's fused kernels.

A CPU has no budget: whoever keeps something there may, and forwards are not measured. Decoding, which takes by far the
most, is compared with what is available to the process at that moment, because the kernel ends a process where an
allocator would have raised an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from bottega.diffusion.device.device import Device
from bottega.errors import TooLarge
from bottega.process.available_memory import available_bytes

_log = logging.getLogger(__name__)

_MIB = 1 << 20
# Left to the device's libraries, whose workspaces torch does not allocate, where no budget is configured.
_LEAST_RESERVE_BYTES = 512 * _MIB
_RESERVE_SHARE = 0.05
# Left to whatever else the host does meanwhile.
_HOST_RESERVE_BYTES = 64 * _MIB
# After so many forwards of a size whose groups were made smaller, larger ones are tried again: what was in the way may
# be gone.
_FORGET_AFTER = 500
# Of sizes whose groups were made smaller; more are as if none was.
_MOST_SIZES = 64


class MemoryPlan:
    """The plan of one device's memory.

    Links reserve and release from threads of their own; all else is of the one that computes.

    Args:
        budget_bytes: Of the device, for this process; None where nothing that is kept there is counted.
        available: Without a budget, what the process can have at this moment; without it nothing is counted at all.
    """

    def __init__(self, budget_bytes: int | None = None, *, available: Callable[[], int | None] = lambda: None) -> None:
        self.budget_bytes = budget_bytes
        self._available = available
        self._lock = threading.Lock()  # of what is reserved
        self._reserved: dict[str, int] = {}
        self._row_bytes = 0.0
        self._decoding_bytes = 0.0
        self._refused: dict[int, tuple[int, int]] = {}

    @property
    def reserved(self) -> Mapping[str, int]:
        """Bytes by who has them."""
        with self._lock:
            return MappingProxyType(dict(self._reserved))

    @property
    def left_bytes(self) -> int | None:
        """The bytes that are left for activations beside the reserved ones; None if nothing is counted."""
        if self.budget_bytes is not None:
            return max(0, self.budget_bytes - sum(self.reserved.values()))
        available = self._available()
        return None if available is None else max(0, available - _HOST_RESERVE_BYTES)

    def reserve(self, name: str, size_bytes: int) -> None:
        """Sets so many bytes aside, instead of what that name had. Raises TooLarge where they are not left."""
        with self._lock:
            self._set(name, size_bytes)

    def reserve_up_to(self, name: str, size_bytes: int, *, share: float) -> int:
        """Sets so many bytes aside, or that share of what is left where this is less. Returns how many.

        For what keeps no more than it is told to: a small device has less of it, and starts.
        """
        with self._lock:
            if self.budget_bytes is not None:
                others = sum(size for holder, size in self._reserved.items() if holder != name)
                most = int(share * max(0, self.budget_bytes - others))
                if size_bytes > most:
                    facts = {"holder": name, "wanted_mib": size_bytes // _MIB, "taken_mib": most // _MIB}
                    _log.warning("the device has less room for something than it may have", extra=facts)
                    size_bytes = most
            self._reserved[name] = size_bytes
        return size_bytes

    def grow(self, name: str, change_bytes: int) -> None:
        """Sets so many bytes more aside for that name; fewer where they are negative. Raises as `reserve` does."""
        with self._lock:
            self._set(name, self._reserved.get(name, 0) + change_bytes)

    def release(self, name: str) -> None:
        """What that name had is free. Harmless when it has nothing."""
        with self._lock:
            self._reserved.pop(name, None)
        self._refused.clear()

    def observe_forward(self, area: int, rows: int, peak_bytes: int | None) -> None:
        """A forward of so many rows took so much beside the weights. area: elements of a latent's height and width."""
        self._row_bytes = max(self._row_bytes, (peak_bytes or 0) / (area * rows))

    def observe_decoding(self, area: int, peak_bytes: int | None) -> None:
        """Decoding a latent took so much. area: of what is decoded at once."""
        self._decoding_bytes = max(self._decoding_bytes, (peak_bytes or 0) / area)

    def fits_decoding(self, area: int) -> bool:
        """Return whether so many elements of a latent can be decoded at once, as far as is known."""
        needed, left = self._decoding_bytes * area, self.left_bytes
        return left is None or needed <= left

    def needed_bytes(self, area: int, *, decoded_area: int) -> int:
        """For a picture by itself, its rows one by one. decoded_area: of what is decoded at once."""
        return round(max(self._row_bytes * area, self._decoding_bytes * decoded_area))

    def check_picture(self, width: int, height: int, *, area: int, decoded_area: int) -> None:
        """Raise TooLarge for a picture that does not fit by itself.

        Args:
            width: In pixels.
            height: In pixels.
            area: Elements of its latent's height and width.
            decoded_area: Of what is encoded or decoded at once.
        """
        needed, left = self.needed_bytes(area, decoded_area=decoded_area), self.left_bytes
        if left is None or needed <= left:
            return
        whose, have = "the device's memory", self._said_left()
        if self.budget_bytes is None:
            whose, have = "memory", f"{left // _MIB} MiB are available to this worker"
        raise TooLarge(
            f"{width}x{height} need about {needed // _MIB} MiB of {whose}, and {have}; ask for fewer pixels",
            metadata=self._facts(needed),
        )

    def leaves_room(self, area: int, rows: int, *, decoded_area: int) -> bool:
        """Return whether what is reserved leaves so many rows of such latents a forward, and each of them its decoding.

        Args:
            area: Elements of a latent's height and width.
            rows: Of the forward.
            decoded_area: Of what is decoded at once of such a latent.
        """
        needed, left = max(self._row_bytes * rows * area, self._decoding_bytes * decoded_area), self.left_bytes
        return left is None or needed <= left

    def refusal(self, width: int, height: int) -> TooLarge:
        """Of a picture for which the device had no memory when it was its turn."""
        why = "" if self.budget_bytes is None else f": {self._said_left()}"
        return TooLarge(
            f"the device has not enough memory for {width}x{height}, not even by themselves{why}; ask for fewer pixels",
            metadata={"limit": "device_memory", "size": f"{width}x{height}"},
        )

    def most_rows(self, area: int, *, decoded_area: int) -> int | None:
        """Return how many rows of such latents fit into one forward beside a decoding, one at least.

        None is as many as there are. To be asked before each forward: it counts them.

        Args:
            area: Elements of a latent's height and width.
            decoded_area: Of what is decoded at once of such a latent.
        """
        bounds = []
        if self._row_bytes and (left := self.left_bytes) is not None:
            free = left - self._decoding_bytes * decoded_area
            bounds.append(max(1, int(free // (self._row_bytes * area))))
        if area in self._refused:
            rows, forwards = self._refused.pop(area)
            bounds.append(rows)
            if forwards > 1:
                self._refused[area] = (rows, forwards - 1)
        return min(bounds, default=None)

    def note_out_of_memory(self, area: int, rows: int) -> None:
        """A forward of so many rows found no memory: groups of this size are half as large for a while."""
        if area not in self._refused and len(self._refused) >= _MOST_SIZES:
            return
        self._refused[area] = (max(1, rows // 2), _FORGET_AFTER)
        _log.warning("the device had no memory for a group; it is split", extra={"rows": rows, "latent_elements": area})

    def _set(self, name: str, size_bytes: int) -> None:
        """Under the lock."""
        before = self._reserved.get(name, 0)
        others = {holder: size for holder, size in self._reserved.items() if holder != name}
        too_much = self.budget_bytes is not None and sum(others.values()) + size_bytes > self.budget_bytes
        if too_much and size_bytes > before:
            raise TooLarge(
                f"{name} would take {size_bytes // _MIB} MiB of the device, and {self._left_beside(others)}; "
                "raise device_memory_mib, or use a larger device",
                metadata=self._facts(size_bytes),
            )
        self._reserved[name] = size_bytes

    def _said_left(self) -> str:
        return self._left_beside(self.reserved)

    def _left_beside(self, others: Mapping[str, int]) -> str:
        """What is left of the budget, and who has the rest."""
        holders = ", ".join(f"{name} {size // _MIB} MiB" for name, size in others.items() if size)
        left = (self.budget_bytes or 0) - sum(others.values())
        return f"{max(0, left) // _MIB} of {(self.budget_bytes or 0) // _MIB} MiB are left" + (
            f" beside {holders}" if holders else ""
        )

    def _facts(self, needed_bytes: int) -> dict[str, str]:
        facts = {"limit": "device_memory", "needed_mib": str(needed_bytes // _MIB)}
        if self.budget_bytes is None:
            return facts
        return facts | {"device_memory_mib": str(self.budget_bytes // _MIB)}


def open_memory_plan(device: Device, budget_mib: int) -> MemoryPlan:
    """Before anything is on the device. budget_mib: 0 is what is free, less a reserve.

    Raises ValueError for a budget that the device does not have, or of a CPU.
    """
    free_bytes = device.free_bytes()
    if free_bytes is None:
        if budget_mib:
            raise ValueError("device_memory_mib bounds the memory of a GPU; that of a CPU's process, its unit bounds")
        return MemoryPlan(available=available_bytes)
    if budget_mib * _MIB > free_bytes:
        raise ValueError(
            f"device_memory_mib is {budget_mib}, and {device.torch_device} has {free_bytes // _MIB} MiB free"
        )
    if budget_mib:
        device.limit_memory(budget_mib * _MIB)
        return MemoryPlan(budget_mib * _MIB)
    return MemoryPlan(free_bytes - max(_LEAST_RESERVE_BYTES, round(_RESERVE_SHARE * free_bytes)))
