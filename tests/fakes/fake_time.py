"""Clocks that the test turns."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.clocks import Clock


@dataclass
class FakeTime:
    """Both clocks of a service: `now` is monotonic, and Unix time is a thousand million seconds ahead of it.

    wrong_s: by how much somebody has set the latter wrong. boot: names the machine's last start.
    """

    now: float = 1000.0
    wrong_s: float = 0.0
    boot: str = "first start"

    def clock(self) -> Clock:
        return Clock(monotonic=self.monotonic, wall=lambda: self.now + 1e9 + self.wrong_s, boot=lambda: self.boot)

    def monotonic(self) -> float:
        return self.now

    def restart_machine(self) -> None:
        """Begin the monotonic clock anew; Unix time goes on, as far as wrong_s says."""
        self.wrong_s += self.now
        self.now, self.boot = 0.0, f"{self.boot} and another"
