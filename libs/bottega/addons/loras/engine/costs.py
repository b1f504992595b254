"""Decides whether to merge a set of LoRAs: compares the cost of unmerged LoRAs in each step with that of merging."""

from __future__ import annotations

from bottega.model.rows import SetKey

# Estimates until something is measured. The share is that of the miniature with rank 16 in all attention layers. The
# seconds per byte are half a pass through a slow core's memory for every read and write of merging and restoring.
_FIRST_SHARE = 0.15
_FIRST_S_PER_BYTE = 3e-9
# Weight of a new measurement.
_WEIGHT = 0.2
# Number of sets whose share is remembered.
_MAX_SETS = 64


class SwapCosts:
    """The measured costs of LoRAs in one engine."""

    def __init__(self) -> None:
        self._share = _FIRST_SHARE
        self._shares: dict[SetKey, float] = {}
        self._s_per_byte: float | None = None
        self._patched_bytes = 0  # bytes of weights that the last measured set changes

    @property
    def last_swap_s(self) -> float:
        """Seconds to merge and restore a set like the last one; 0 before the first."""
        return self.swap_s(self._patched_bytes)

    def share(self, key: SetKey) -> float:
        """Return the time that an unmerged set adds to a step, as a share of a plain step; an average for a new set."""
        return self._shares.get(key, self._share)

    def swap_s(self, touched_bytes: int) -> float:
        """Return the seconds to merge LoRAs into `touched_bytes` of weights and to restore these."""
        per_byte = _FIRST_S_PER_BYTE if self._s_per_byte is None else self._s_per_byte
        return touched_bytes * per_byte

    def observe_step(self, key: SetKey, seconds: float, plain_s: float) -> None:
        """Update the cost of an unmerged set from a step in which all rows used it.

        Args:
            key: The set of LoRAs.
            seconds: Duration of the step.
            plain_s: Duration of the same step without LoRAs.
        """
        share = min(max(seconds / plain_s - 1.0, 0.0), 2.0 * self.share(key) + 0.1)  # bounded, to ignore outliers
        self._share += _WEIGHT * (share - self._share)
        before = self._shares.pop(key, share)
        self._shares[key] = before + _WEIGHT * (share - before)
        if len(self._shares) > _MAX_SETS:
            del self._shares[next(iter(self._shares))]

    def observe_patch(self, touched_bytes: int, seconds: float) -> None:
        """Update the cost of merging per byte. Restoring the weights is taken to cost half as much."""
        if touched_bytes:
            measured = 1.5 * seconds / touched_bytes
            before = measured if self._s_per_byte is None else self._s_per_byte
            self._s_per_byte = before + _WEIGHT * (measured - before)
            self._patched_bytes = touched_bytes

    def expect_patch(self, touched_bytes: int) -> None:
        """Assume that sets change `touched_bytes` of weights, until the first one is merged."""
        self._patched_bytes = touched_bytes

    def pays(self, key: SetKey, *, steps: int, step_s: float, touched_bytes: int) -> bool:
        """Return whether merging saves time for a set that all rows use for `steps` more steps of `step_s` seconds."""
        return steps * step_s * self.share(key) > self.swap_s(touched_bytes)
