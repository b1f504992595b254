"""The interface through which a forward pass gets ControlNets' residuals."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from bottega.model.rows import Row


class ResidualProvider(Protocol):
    """Provides ControlNets' residuals for rows with ControlNets, at points of the backbone (`Block.needs`).

    All calls come from the engine's thread.
    """

    def ask(self, rows: list[Row]) -> None:
        """Send the inputs of the ControlNets for these rows' step, and return at once.

        Called at the beginning of every forward pass with such rows. A row that was late is sent again, at the same
        step.
        """
        ...

    def ask_ahead(self, rows: list[Row]) -> None:
        """Send the inputs of the ControlNets for rows of a later forward pass, and return at once.

        The ControlNets then compute while this engine does other work. Called after a forward pass, with the next steps
        of its requests. It may do nothing, because `ask` is called in any case.
        """
        ...

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        """Return whether all residuals of a row at these points have arrived."""
        ...

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        """Wait until one of the rows is ready at these points, or its sender has died, or until the timeout.

        When this is called, no row is ready, and no sender has died.
        """
        ...

    def is_void(self, row: Row) -> bool:
        """Return whether the sender of a row's residuals has died.

        The residuals that the row got in this forward pass are then useless, and the row must leave it. Its step is
        sent again when its sessions are open at another sender, which may have to start them first.
        """
        ...

    def take(self, row: Row, point: int) -> list[Tensor]:
        """Return a row's residuals at one point, scaled and in the order of `row.controls`.

        Each is [channels, height, width].
        """
        ...

    def is_shared(self, row: Row) -> bool:
        """Return whether a row's residuals were not computed alone.

        Then the ControlNet's forward pass had more or fewer rows than those of the row's owner in one session.
        """
        ...
