"""Whether a set should go into the weights: compares the measured cost per step of unmerged LoRAs with that of a swap.

Plain numbers.
"""

from __future__ import annotations

from bottega.diffusion.rows import SetKey

# Until something is measured. A share: the miniature, rank 16 in all attention layers. Seconds for a byte: half a pass
# of a slow core's memory for every read and write of patching and restoring.
_FIRST_SHARE = 0.15
_FIRST_S_PER_BYTE = 3e-9
# Weight of a new measurement.
_WEIGHT = 0.2
# Sets whose share is remembered.
_MAX_SETS = 64


class SwapCosts:
    """What LoRAs cost in one engine."""

    def __init__(self) -> None:
        self._share = _FIRST_SHARE
        self._shares: dict[SetKey, float] = {}
        self._s_per_byte: float | None = None
        self._patched_bytes = 0  # by the last set that was measured

    @property
    def last_swap_s(self) -> float:
        """Seconds that a set like the last one takes to go into the weights and out again; 0 before one was seen."""
        return self.swap_s(self._patched_bytes)

    def share(self, key: SetKey) -> float:
        """What the side path adds to a step with this set, as a share of the step without; of a new set, as usual."""
        return self._shares.get(key, self._share)

    def swap_s(self, touched_bytes: int) -> float:
        """Seconds that patching and restoring so many bytes of weights take together."""
        per_byte = _FIRST_S_PER_BYTE if self._s_per_byte is None else self._s_per_byte
        return touched_bytes * per_byte

    def observe_step(self, key: SetKey, seconds: float, plain_s: float) -> None:
        """A step whose rows all had this set by the side path. plain_s: what it takes without."""
        share = min(max(seconds / plain_s - 1.0, 0.0), 2.0 * self.share(key) + 0.1)  # a hiccup is no measurement
        self._share += _WEIGHT * (share - self._share)
        before = self._shares.pop(key, share)
        self._shares[key] = before + _WEIGHT * (share - before)
        if len(self._shares) > _MAX_SETS:
            del self._shares[next(iter(self._shares))]

    def observe_patch(self, touched_bytes: int, seconds: float) -> None:
        """A patch of so many bytes of weights; restoring writes them once more, in about half the time."""
        if touched_bytes:
            measured = 1.5 * seconds / touched_bytes
            before = measured if self._s_per_byte is None else self._s_per_byte
            self._s_per_byte = before + _WEIGHT * (measured - before)
            self._patched_bytes = touched_bytes

    def expect_patch(self, touched_bytes: int) -> None:
        """Expect sets to touch so many bytes of weights, until one has been put in."""
        self._patched_bytes = touched_bytes

    def pays(self, key: SetKey, *, steps: int, step_s: float, touched_bytes: int) -> bool:
        """Whether a set that all rows will share for so many steps should go into the weights."""
        return steps * step_s * self.share(key) > self.swap_s(touched_bytes)
