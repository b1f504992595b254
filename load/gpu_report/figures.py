"""One measured figure: what it is, and what was wanted of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """name: in the line of JSON. label: for people. value: in `unit`; NaN is a result that is none.

    group: the figures that are drawn side by side, by what they say together; empty is not drawn.
    at_least, at_most: what was wanted; None for neither.
    """

    name: str
    label: str
    value: float
    unit: str = ""
    group: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def said(self) -> str:
        """The value, for people."""
        digits = 0 if abs(self.value) >= 1000 else 1 if abs(self.value) >= 100 else 2 if abs(self.value) >= 1 else 4
        return f"{self.value:.{digits}f} {self.unit}".strip()

    @property
    def wanted(self) -> str:
        """What was wanted, and whether it was missed; empty where nothing was."""
        if self.bound is None:
            return ""
        word = "at least" if self.at_least is not None else "at most"
        return f"{word} {self.bound:g}{'' if self.met else '  MISSED'}"

    @property
    def bound(self) -> float | None:
        """Of what was wanted."""
        return self.at_least if self.at_least is not None else self.at_most

    @property
    def met(self) -> bool:
        """Whether it is what was wanted; so is what nobody wanted anything of."""
        if self.bound is None:
            return True
        if math.isnan(self.value):
            return False
        return self.value >= self.bound if self.at_least is not None else self.value <= self.bound

    def to_json(self) -> Mapping[str, Any]:
        """As `from_json` reads it. NaN is null, which every reader of JSON knows."""
        return {**asdict(self), "value": None if math.isnan(self.value) else self.value}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Figure:
        """Of what `to_json` made. Raises TypeError for anything else."""
        value = said.get("value")
        return cls(**{**said, "value": math.nan if value is None else value})
