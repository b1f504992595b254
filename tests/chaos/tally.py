"""What a scene of chaos has counted: the four numbers that must be 0, and the figures beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Tally:
    """lost: acknowledged requests without a picture. double: requests that ended twice. different_images: not what an
    undisturbed request gives. client_errors: that the SDK raised.

    figures: measured, by name. faults: bounds that did not hold, in words.
    """

    lost: int = 0
    double: int = 0
    different_images: int = 0
    client_errors: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def zeros(self) -> dict[str, int]:
        """The numbers that must be 0."""
        return {
            "lost": self.lost,
            "double": self.double,
            "different_images": self.different_images,
            "client_errors": self.client_errors,
        }

    @property
    def well(self) -> bool:
        return not any(self.zeros.values()) and not self.faults

    def most(self, figure: str, value: float) -> None:
        """Keeps the largest value of a figure."""
        self.figures[figure] = max(value, self.figures.get(figure, value))

    def count(self, figure: str) -> int:
        """Counts one more of a figure; how many there are."""
        self.figures[figure] = self.figures.get(figure, 0) + 1
        return int(self.figures[figure])

    def check(self, what: str, value: float, at_most: float) -> None:
        if value > at_most:
            self.faults.append(f"{what}: {value:g}, at most {at_most:g} was promised")

    def reached(self, figure: str, at_least: float) -> None:
        """What a part is about must have happened so often, or its zeros say nothing."""
        if self.figures.get(figure, 0) < at_least:
            self.faults.append(f"{figure}: {self.figures.get(figure, 0):g}, at least {at_least:g} were to be")

    def tries(self, figure: str, times: int, *, each: int = 2) -> Iterator[None]:
        """Turns of a loop, until it has counted so many of a figure: not every disturbance comes in time.

        each: of which one at least should; fewer mean that something else is wrong. Who has counted a loss leaves the
        loop by itself: more of the same says no more.
        """
        for _ in range(each * times):
            if self.figures.get(figure, 0) < times:
                yield
        self.reached(figure, times)

    def add(self, part: str, tally: Tally) -> None:
        """What a part has counted; its figures get its name, for another part may have counted the same."""
        self.lost += tally.lost
        self.double += tally.double
        self.different_images += tally.different_images
        self.client_errors += tally.client_errors
        name = part.replace("-", "_")
        self.figures |= {f"{name}_{figure}": value for figure, value in tally.figures.items()}
        self.faults += [f"{part}: {fault}" for fault in tally.faults]

    def ended(self, requests: Iterable[str]) -> None:
        """Of every request that was seen to end, its name, as often as it did."""
        self.double += sum(times - 1 for times in Counter(requests).values())
