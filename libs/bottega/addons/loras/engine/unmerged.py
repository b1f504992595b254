"""Unmerged LoRAs: low-rank products for each batch row, added to the output of unchanged weights.

This way rows with different LoRAs, or none, can share one forward pass (as in S-LoRA). Adjacent rows with the same set
are one product; sets with equally many adjacent rows are one batched product. Factors with terms are computed LoRA by
LoRA instead, with PEFT's operations in PEFT's order, so that half precision rounds as in stock Diffusers. A LoRA
without a low-rank form is one more product with a whole matrix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from bottega.addons.loras.engine.lora import add_difference, low_rank_product
from bottega.model.backbone import RowSpans
from bottega.model.rows import Difference, Factors, LoraSet, SetKey

STACKED_BYTES = 512 << 20
"""Maximum bytes of plans kept for batches that alternate. A plan holds the factors, or a stacked copy of them."""

_Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]
_Offsets = Callable[[], tuple[int, ...] | None]
_Bounds = Callable[[], tuple[int, int]]
_Arrangement = tuple[SetKey | None, ...]


class UnmergedLoras:
    """Adds each row's LoRAs to the outputs of the modules they change, for one forward pass at a time.

    Dimension 0 of a module's input has the rows or, according to `spans`, the packed tokens or tiles of all rows.

    Args:
        network: The component that the LoRAs belong to; its weights are not changed.
        component: Name of the component in `LoraSet`.
        row_by_row: Compute every row by itself, so that its last bits do not depend on other rows.
        stacked_bytes: Maximum bytes of plans that are kept for later batches with the same sets, besides the one in
            use.
    """

    def __init__(
        self,
        network: nn.Module,
        component: str,
        *,
        row_by_row: bool = False,
        stacked_bytes: int = STACKED_BYTES,
    ) -> None:
        self._modules = dict(network.named_modules())
        self._component = component
        self._row_by_row = row_by_row
        self._stacked_bytes = stacked_bytes
        self._plans: OrderedDict[_Arrangement, _Plan] = OrderedDict()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._spans: RowSpans | None = None

    def enter(self, sets: Sequence[LoraSet | None], spans: RowSpans | None = None) -> None:
        """Make row i use sets[i], in place of the sets that were entered before.

        Args:
            sets: LoRAs of each row; None for none. Rows with the same set should be adjacent.
            spans: Where the rows are in dimension 0 of each call; None if they are its elements.
        """
        self.leave()
        self._spans = spans
        if any(row_set is not None for row_set in sets):
            self._hook(self._plan(sets).hooks)

    def enter_all(self, loras: LoraSet) -> None:
        """Make every row of every call use `loras`, whose factors have terms."""
        self.leave()
        self._hook((path, _as_peft([(factors, None)])) for path, factors in loras.of(self._component).items())
        differences = loras.differences_of(self._component)
        self._hook((path, _different([(difference, None)])) for path, difference in differences.items())

    def leave(self) -> None:
        """Return to the plain forward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._spans = None

    def drop_plans(self) -> None:
        """Drop the prepared sets that are kept for later calls."""
        self._plans.clear()

    def _hook(self, hooks: Iterable[tuple[str, _Hook]]) -> None:
        self._handles += [self._modules[path].register_forward_hook(hook) for path, hook in hooks]

    def _offsets(self) -> tuple[int, ...] | None:
        """Return where each row begins in dimension 0 of the current call; None if the rows are its elements."""
        return None if self._spans is None else self._spans.offsets

    def _plan(self, sets: Sequence[LoraSet | None]) -> _Plan:
        arrangement = tuple(None if row_set is None else row_set.key for row_set in sets)
        plan = self._plans.pop(arrangement, None) or self._made(sets)
        self._plans[arrangement] = plan
        while len(self._plans) > 1 and sum(kept.size_bytes for kept in self._plans.values()) > self._stacked_bytes:
            self._plans.popitem(last=False)
        return plan

    def _made(self, sets: Sequence[LoraSet | None]) -> _Plan:
        runs = _runs(sets, self._component, row_by_row=self._row_by_row)
        paths = dict.fromkeys(path for run in runs for path in run.factors)
        hooks: list[tuple[str, _Hook]] = []
        size_bytes = 0
        frozen = [partial(run.bounds, self._offsets) for run in runs if _has_terms(run.factors)]
        if frozen:
            hooks += [
                (path, _as_frozen(frozen)) for path, module in self._modules.items() if _mixes_layouts(path, module)
            ]
        for path in paths:
            module = self._modules[path]
            touching = [run for run in runs if path in run.factors]
            if _has_terms(touching[0].factors):
                uses = [(run.factors[path], partial(run.bounds, self._offsets)) for run in touching]
                hooks.append((path, _as_peft(uses)))
                # Not copied, but kept alive by the plan when no request uses them any more.
                size_bytes += sum(run.factors[path].size_bytes for run in touching)
                continue
            stacks = [
                _conv_stack(path, alike) if isinstance(module, nn.Conv2d) else _linear_stack(path, alike)
                for alike in _alike(touching, row_by_row=self._row_by_row)
            ]
            size_bytes += sum(stack.size_bytes for stack in stacks)
            hook = _convolved if isinstance(module, nn.Conv2d) else _projected
            hooks.append((path, hook(stacks, self._offsets)))
        for path in dict.fromkeys(path for run in runs for path in run.differences):
            touching = [run for run in runs if path in run.differences]
            hooks.append(
                (path, _different([(run.differences[path], partial(run.bounds, self._offsets)) for run in touching]))
            )
            size_bytes += sum(run.differences[path].size_bytes for run in touching)
        return _Plan(hooks=hooks, size_bytes=size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """The hooks of all changed modules, for one sequence of sets."""

    hooks: Sequence[tuple[str, _Hook]]
    """Pairs of module path and hook, in the order in which the hooks run."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """The adjacent rows [first, first + rows), which use the same set."""

    first: int
    rows: int
    factors: Mapping[str, Factors]
    differences: Mapping[str, Difference]

    def bounds(self, offsets: _Offsets) -> tuple[int, int]:
        """Return where the rows begin and end in dimension 0 of the current call."""
        first, last = self.first, self.first + self.rows
        packed = offsets()
        return (first, last) if packed is None else (packed[first], packed[last])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stack:
    """Adjacent runs with equally many rows, whose products are computed together.

    Smaller ranks are padded with zeros.
    """

    first: int
    """Index of the first row."""
    last: int
    """Index after the last row."""
    sets: int
    """Number of runs."""
    down: Tensor
    """Linear: [sets, in, rank]. Convolution: [rows * rank, in, kernel, kernel], or [rank, ...] for one set."""
    up: Tensor
    """Linear: [sets, rank, out]. Convolution: [rows, out, rank], or [1, out, rank] for one set."""

    @property
    def size_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def bounds(self, offsets: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return where each set's rows begin in dimension 0, and where the last set's end.

        Args:
            offsets: See RowSpans.
        """
        rows = (self.last - self.first) // self.sets
        edges = range(self.first, self.last + 1, rows)
        return tuple(edges) if offsets is None else tuple(offsets[edge] for edge in edges)

    def of_set(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the down and up weights of the set with index `place`, for a convolution."""
        rank = self.up.shape[-1]
        downs = self.down.view(-1, rank, *self.down.shape[1:])
        first = place * (len(downs) // self.sets)
        return downs[first], self.up[first]


def _has_terms(factors: Mapping[str, Factors]) -> bool:
    """Return whether factors are computed LoRA by LoRA. All factors of a set are, or none."""
    return any(factor.terms for factor in islice(factors.values(), 1))


def _runs(sets: Sequence[LoraSet | None], component: str, *, row_by_row: bool) -> list[_Run]:
    runs: list[_Run] = []
    first = 0
    for place, row_set in enumerate(sets):
        last = place == len(sets) - 1
        if row_by_row or last or sets[place + 1] is not row_set:
            if row_set is not None:
                runs.append(
                    _Run(
                        first=first,
                        rows=place + 1 - first,
                        factors=row_set.of(component),
                        differences=row_set.differences_of(component),
                    )
                )
            first = place + 1
    return runs


def _alike(runs: Sequence[_Run], *, row_by_row: bool) -> list[list[_Run]]:
    """Return groups of runs that can be one batched product: adjacent runs with equally many rows."""
    groups: list[list[_Run]] = []
    for run in runs:
        before = groups[-1][-1] if groups else None
        if before and not row_by_row and before.rows == run.rows and before.first + before.rows == run.first:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _linear_stack(path: str, runs: Sequence[_Run]) -> _Stack:
    down, up = _padded([run.factors[path] for run in runs])
    return _Stack(
        first=runs[0].first,
        last=runs[-1].first + runs[-1].rows,
        sets=len(runs),
        down=down.transpose(1, 2),
        up=up.transpose(1, 2),
    )


def _conv_stack(path: str, runs: Sequence[_Run]) -> _Stack:
    down, up = _padded([run.factors[path] for run in runs])
    if len(runs) > 1:  # one grouped convolution with a group for each row
        down, up = (factor.repeat_interleave(runs[0].rows, dim=0) for factor in (down, up))
    return _Stack(
        first=runs[0].first, last=runs[-1].first + runs[-1].rows, sets=len(runs), down=down.flatten(0, 1), up=up
    )


def _padded(factors: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """Return the factors stacked: down [sets, rank, ...], up [sets, out, rank]."""
    rank = max(set_factors.rank for set_factors in factors)
    down = torch.stack([_filled(set_factors.down, 0, rank) for set_factors in factors])
    return down, torch.stack([_filled(set_factors.up, 1, rank) for set_factors in factors])


def _filled(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return the tensor with zeros appended in a dimension, so that it has that size there."""
    lack = size - tensor.shape[dim]
    return functional.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, lack]) if lack else tensor


def _mixes_layouts(path: str, module: nn.Module) -> bool:
    """Return whether a linear layer gets feature maps as tokens. Views of some tokens give the same bits either way."""
    return isinstance(module, nn.Linear) and path.rpartition(".")[2] == "proj_in"


def _as_frozen(rows: Sequence[_Bounds]) -> _Hook:
    """Return a hook that computes a linear layer again for rows with LoRAs, as PEFT does.

    PEFT's base weights do not require gradients. That determines how torch multiplies input that is not contiguous, and
    half precision rounds differently. Rows without LoRAs keep the output of weights that require gradients.

    Args:
        rows: Bounds of the rows with LoRAs in dimension 0.
    """

    def multiply(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(module, nn.Linear), "the hook is a linear layer's"
        x = inputs[0]
        if x.is_contiguous():
            return output
        weight, bias = module.weight.detach(), _detached(module.bias)
        for bounds in rows:
            first, last = bounds()
            output[first:last] = functional.linear(x[first:last], weight, bias)
        return output

    return multiply


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


def _as_peft(uses: Sequence[tuple[Factors, _Bounds | None]]) -> _Hook:
    """Return a hook that adds the same terms as PEFT's layers, LoRA by LoRA, with every intermediate result rounded.

    Args:
        uses: Factors with the bounds of their rows in dimension 0; None for all rows.
    """

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for factors, bounds in uses:
            first, last = bounds() if bounds else (0, output.shape[0])
            if first == last:
                continue
            x, total, rank = inputs[0][first:last], output[first:last], 0
            for term in factors.terms:
                down, up = factors.down[rank : rank + term.rank], factors.up[:, rank : rank + term.rank]
                total += low_rank_product(module, x, down, up) * term.scale
                rank += term.rank
        return output

    return add


def _different(uses: Sequence[tuple[Difference, _Bounds | None]]) -> _Hook:
    """Return a hook that adds the products of whole differences.

    Args:
        uses: Differences with the bounds of their rows in dimension 0; None for all rows.
    """

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for difference, bounds in uses:
            first, last = bounds() if bounds else (0, output.shape[0])
            if first < last:
                add_difference(module, inputs[0][first:last], output[first:last], difference)
        return output

    return add


def _projected(stacks: Sequence[_Stack], offsets: _Offsets) -> _Hook:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # The output may be changed in place: the module has just made it, and nothing else has read it.
        for stack in stacks:
            bounds = stack.bounds(offsets())
            if bounds[0] == bounds[-1]:
                continue  # The rows of other sizes have these sets.
            if len({last - first for first, last in pairwise(bounds)}) == 1:  # equally long: one batched product
                x = inputs[0][bounds[0] : bounds[-1]].reshape(stack.sets, -1, inputs[0].shape[-1])
                total = output[bounds[0] : bounds[-1]].view(stack.sets, -1, output.shape[-1])
                total.baddbmm_(torch.bmm(x, stack.down), stack.up)
                continue
            for place, (first, last) in enumerate(pairwise(bounds)):
                x, total = inputs[0][first:last].flatten(0, -2), output[first:last].flatten(0, -2)
                total.addmm_(x @ stack.down[place], stack.up[place])
        return output

    return add


def _convolved(stacks: Sequence[_Stack], offsets: _Offsets) -> _Hook:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(module, nn.Conv2d), "the hook is a convolution's"
        x = inputs[0]
        for stack in stacks:
            packed = offsets()
            if packed is None:
                first, last = stack.first, stack.last
                _add_convolved(module, x[first:last], output[first:last], stack.down, stack.up)
                continue
            for place, (first, last) in enumerate(pairwise(stack.bounds(packed))):
                _add_convolved(module, x[first:last], output[first:last], *stack.of_set(place))
        return output

    return add


def _add_convolved(module: nn.Conv2d, x: Tensor, output: Tensor, down: Tensor, up: Tensor) -> None:
    """Add a convolution's product to `output`, [items, channels, height, width].

    Args:
        module: The convolution.
        x: Its input.
        output: Its output.
        down: See _Stack; one for all items, or one for each.
        up: See _Stack; one for all items, or one for each.
    """
    items, groups = x.shape[0], down.shape[0] // up.shape[-1]
    if not items:
        return
    if groups > 1:
        x = x.reshape(1, -1, *x.shape[2:])
    low = functional.conv2d(x, down, None, module.stride, module.padding, module.dilation, groups)
    output += (up @ low.reshape(items, up.shape[-1], -1)).view_as(output)
