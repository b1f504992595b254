"""Measures how much the residuals of ControlNets change from step to step, when forward passes read them.

It wraps a ControlNetProvider. Sessions that are not measured pass through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from bottega.addons.controlnets.engine.provider import ControlInput, ControlNetProvider, ControlRecord
from bottega.model.rows import Half, Row

# An image and one of its halves.
_Half = tuple[Hashable, Half]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Inner products of one residual at two adjacent steps: with each other, and each with itself.

    They are scalars on the device, and are read only when the session has ended.
    """

    between: Tensor
    before: Tensor
    after: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class SimilarityMeter:
    """Measures the residuals of one session. A step that is repeated counts once, with its last values."""

    _products: dict[tuple[_Half, int], dict[int, _Product]] = field(default_factory=dict)
    _newest: dict[_Half, dict[int, dict[int, Tensor]]] = field(default_factory=dict)

    @property
    def cosines(self) -> list[float]:
        """Cosines between adjacent steps over all residuals, one for each half of guidance of each image."""
        return [_cosine(products) for products in self._products.values()]

    @property
    def similarity(self) -> float | None:
        """The mean of the cosines; None if there are no two steps to compare."""
        cosines = self.cosines
        return math.fsum(cosines) / len(cosines) if cosines else None

    def observe(self, row: Row, point: int, residual: Tensor) -> None:
        """Record the residual that a forward pass read for a row. `point` is the residual's index."""
        half = (row.owner, row.half)
        steps = self._newest.setdefault(half, {})
        for step in [step for step in steps if step < row.step - 1]:
            del steps[step]
        now = residual.detach().float().flatten().clone()  # a copy: the server reuses the memory after the step
        steps.setdefault(row.step, {})[point] = now
        before = steps.get(row.step - 1, {}).get(point)
        if before is not None:
            self._products.setdefault((half, row.step), {})[point] = _Product(
                between=before @ now, before=before @ before, after=now @ now
            )


class MeasuredControlNets:
    """A ControlNetProvider around another one, which adds measured similarities to the records."""

    def __init__(self, controlnets: ControlNetProvider) -> None:
        self._controlnets = controlnets
        self._meters: dict[Hashable, SimilarityMeter] = {}

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        handles = self._controlnets.open(controls)
        for handle, control in zip(handles, controls, strict=True):
            if control.measured:
                self._meters[handle] = SimilarityMeter()
        return handles

    def opened(self, handles: Sequence[Hashable]) -> bool:
        return self._controlnets.opened(handles)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        self._controlnets.settle(handles, timeout_s)

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        records = self._controlnets.close(handles)
        meters = [self._meters.pop(handle, None) for handle in handles]
        return tuple(
            record if meter is None else replace(record, similarity=meter.similarity)
            for record, meter in zip(records, meters, strict=True)
        )

    def ask(self, rows: list[Row]) -> None:
        self._controlnets.ask(rows)

    def ask_ahead(self, rows: list[Row]) -> None:
        self._controlnets.ask_ahead(rows)

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return self._controlnets.ready(row, points)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        self._controlnets.wait(rows, points, timeout_s)

    def is_void(self, row: Row) -> bool:
        return self._controlnets.is_void(row)

    def is_shared(self, row: Row) -> bool:
        return self._controlnets.is_shared(row)

    def take(self, row: Row, point: int) -> list[Tensor]:
        addends = self._controlnets.take(row, point)
        if self._meters:
            for handle, addend in zip(row.controls, addends, strict=True):
                if handle in self._meters:
                    self._meters[handle].observe(row, point, addend)
        return addends


def _cosine(products: Mapping[int, _Product]) -> float:
    """Return the cosine of all residuals as one vector; 0 if a step has none."""
    between = math.fsum(float(product.between) for product in products.values())
    lengths = math.prod(
        math.sqrt(math.fsum(float(getattr(product, name)) for product in products.values()))
        for name in ("before", "after")
    )
    return max(-1.0, min(1.0, between / lengths)) if lengths > 0 else 0.0
