"""The interface through which a forward gets ControlNet residuals."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bottega.model.rows import Row


class ResidualProvider(Protocol):
    """A provider of ControlNet residuals. It only gets rows with ControlNets.

    Points are those of the backbone. All calls come from the engine's thread.
    """

    def ask(self, rows: list[Row]) -> None:
        """Send the inputs of the ControlNets for these rows' step, and return at once.

        Called at the start of every turn with such rows. A row that was late is asked for again, at the same step.
        """
        ...

    def ask_ahead(self, rows: list[Row]) -> None:
        """Send the inputs of the ControlNets for rows of a later turn, and return at once.

        The ControlNets then compute while this engine does other work. Called at the end of a turn with the next steps
        of its requests. It may do nothing, because `ask` is called in any case.
        """
        ...

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        """Return whether all residuals of a row at these points have arrived."""
        ...

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        """Wait until one of the rows is ready at these points, or its sender has died, or until the timeout.

        None of the rows is ready or void when this is called.
        """
        ...

    def is_void(self, row: Row) -> bool:
        """Return whether the sender of a row's residuals has died.

        The residuals that the row took in this turn are then useless. The row must leave the forward. Its step is
        requested again when the row's sessions are open at another sender, which may have to start them first.
        """
        ...

    def take(self, row: Row, point: int) -> list[Tensor]:
        """Return a row's residuals at one point, scaled and in the order of `row.controls`.

        Each is [channels, height, width].
        """
        ...

    def is_shared(self, row: Row) -> bool:
        """Return whether residuals that the row took were not computed alone.

        A ControlNet's forward then held more or fewer rows than those of the row's owner in one session.
        """
        ...
