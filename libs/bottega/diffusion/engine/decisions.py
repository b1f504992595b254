"""What an attempt decides that a later attempt of its job has to repeat, to draw the same picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """One field for each decision; None is not decided. loras_step: the step from which the LoRAs are in force."""

    loras_step: int | None = None

    def or_else(self, earlier: Decisions) -> Decisions:
        """These, and the earlier ones where these decide nothing."""
        return replace(earlier, **{name: value for name, value in asdict(self).items() if value is not None})


NO_DECISIONS = Decisions()
