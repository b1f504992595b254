"""Where ControlNet residuals come from, as a forward sees it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bottega.diffusion.rows import Row


class ResidualProvider(Protocol):
    """Where ControlNet residuals come from. Rows without controls are never shown to it.

    The points are those of the backbone. All calls come from the engine's thread.
    """

    def ask(self, rows: list[Row]) -> None:
        """Sends what the ControlNets need for these rows' step, and returns at once.

        Called at the start of every turn that has rows with controls; a row that was late is asked for again,
        at the same step.
        """
        ...

    def ask_ahead(self, rows: list[Row]) -> None:
        """Sends what the ControlNets need for rows that will be asked for in a later turn, and returns at once, so that
        they compute while this engine is busy with other things.

        Called when a turn is over, with the next steps of its requests. It may do nothing: `ask` comes in any case.
        """
        ...

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        """Whether every addend of the row at these points has arrived."""
        ...

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        """Returns when one of the rows, none of which is ready at these points or void, is one of the two, or after
        the timeout."""
        ...

    def is_void(self, row: Row) -> bool:
        """Whether its sender has died: what was taken for the row this turn is void, and what is missing of it comes
        from somebody else, who may have to begin first.

        The row has to leave the forward, and to be asked for again when its sessions are open.
        """
        ...

    def take(self, row: Row, point: int) -> list[Tensor]:
        """The addends at one point, scaled, in the order of row.controls; [channels, height, width]."""
        ...
