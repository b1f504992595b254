"""LoRAs in the weights: W = W0 + up @ down in place, from pristine copies of the touched layers and of no others.

Putting back copies the pristine weights, so that they are equal bit for bit after any number of swaps, in every element
type. The copies stay for the next set: making them costs more than the sums.
Parameters stay where they are in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

from bottega.diffusion.device.threads import compute_alone
from bottega.diffusion.operations import Operations, WeightSum
from bottega.diffusion.rows import Factors, LoraSet

# Of weights. Below, waking threads, a tenth of a millisecond each, takes longer than what they take over.
_WORTH_THREADS_BYTES = 4 << 20


class Patcher:
    """The weights of one component. keep_on: where pristine copies are kept; None is beside the weights.

    operations: writes sums by what is in them.
    Everything is between two forwards: nothing may read the weights meanwhile.
    """

    def __init__(
        self,
        network: nn.Module,
        component: str,
        *,
        keep_on: torch.device | None = None,
        operations: Operations | None = None,
    ) -> None:
        self._modules = dict(network.named_modules())
        self._component = component
        self._keep_on = keep_on
        self._operations = operations or Operations()
        self._pristine: dict[str, Tensor] = {}
        self._patched: LoraSet | None = None

    @property
    def patched(self) -> LoraSet | None:
        """What is in the weights; None where they are untouched."""
        return self._patched

    @property
    def pristine_bytes(self) -> int:
        """What the pristine copies take: of the layers that the last set touched, until `restore`."""
        return sum(copy.nbytes for copy in self._pristine.values())

    def touched_bytes(self, loras: LoraSet) -> int:
        """Of the weights that a set changes."""
        return sum(self._weight(path).nbytes for path in loras.of(self._component))

    @torch.inference_mode()
    def patch(self, loras: LoraSet) -> None:
        """Puts a set into the weights, in place of what was in them."""
        if loras is self._patched:
            return
        factors = loras.of(self._component)
        self._forget([path for path in self._pristine if path not in factors])
        changed = set(self._pristine) if self._patched is not None else set()
        self._patched = loras  # before the first weight changes: whatever fails below, restore puts all back
        self._share_out(lambda paths: self._write(paths, factors, changed), list(factors))

    @torch.inference_mode()
    def put_back(self) -> None:
        """Back to the untouched weights, bit for bit; keeps the copies. Harmless when nothing is patched."""
        if self._patched is not None:
            self._copy_back(list(self._pristine))
        self._patched = None

    @torch.inference_mode()
    def restore(self) -> None:
        """As `put_back`, and gives the copies' memory back."""
        self.put_back()
        self._pristine.clear()

    def _forget(self, paths: list[str]) -> None:
        if self._patched is not None:
            self._copy_back(paths)
        for path in paths:  # only now: a copy that failed can be tried again
            del self._pristine[path]

    def _write(self, paths: Iterable[str], factors: Mapping[str, Factors], changed: Collection[str]) -> None:
        """changed: of whose weights a set is part already; the others are as pristine as their copies."""
        write = self._operations.write_sums or _write_sums
        write(self._sums(paths, factors, changed))

    def _sums(
        self, paths: Iterable[str], factors: Mapping[str, Factors], changed: Collection[str]
    ) -> Iterator[WeightSum]:
        """One by one, so that a weight which is copied first is written while it is still near."""
        for path in paths:
            weight = self._weight(path)
            if path not in self._pristine:
                self._pristine[path] = weight.to(self._keep_on or weight.device, copy=True)
            before = self._pristine[path] if path in changed else weight
            yield WeightSum(weight=weight, before=before, factors=factors[path])

    def _copy_back(self, paths: Sequence[str]) -> None:
        self._share_out(self._copy, paths)

    def _copy(self, paths: Sequence[str]) -> None:
        if paths:
            torch._foreach_copy_([self._weight(path) for path in paths], [self._pristine[path] for path in paths])

    def _share_out(self, work: Callable[[Sequence[str]], None], paths: Sequence[str]) -> None:
        """Has as many threads as torch computes with here do that work, each with its own layers.

        Two threads in one layer after the other wake each other for every one, which takes as long as a small layer.
        """
        weights = [self._weight(path) for path in paths]
        if any(each.is_cuda for each in weights):
            work(paths)
            return
        shares = min(torch.get_num_threads(), len(paths))
        if sum(each.nbytes for each in weights) < _WORTH_THREADS_BYTES:
            shares = 1
        done = [_threads().submit(torch.inference_mode()(work), paths[i::shares]) for i in range(shares)]
        wait(done)
        for each in done:
            each.result()

    def _weight(self, path: str) -> Tensor:
        weight = self._modules[path].weight
        assert isinstance(weight, Tensor), "a set names linear and convolution layers alone"
        return weight.data


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Kept: a new thread's first product takes milliseconds more than the next one."""
    return ThreadPoolExecutor(thread_name_prefix="patch", initializer=compute_alone)


def as_matrix(tensor: Tensor) -> Tensor:
    """A weight, or what is shaped like it, as [first dimension, the others] in the order in which it lies in memory."""
    if tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).flatten(1)
    return tensor.view(tensor.shape[0], -1)


def down_matrix(each: WeightSum) -> Tensor:
    """The factors' `down` as [rank, columns], its columns in the order of `as_matrix` of the weight."""
    down, weight = each.factors.down, each.weight
    return down.flatten(1) if weight.is_contiguous() else down.permute(0, 2, 3, 1).flatten(1)


def _write_sums(sums: Iterable[WeightSum]) -> None:
    for each in sums:
        _write_sum(each)


def _write_sum(each: WeightSum) -> None:
    """A weight that is pristine itself is read and written in one pass."""
    weight, low = each.weight, down_matrix(each)
    after = as_matrix(weight)
    before = after if each.before is weight else as_matrix(each.before.to(weight.device))
    if weight.dtype == torch.float32:
        torch.addmm(before, each.factors.up, low, out=after)
    else:
        after.copy_(torch.addmm(before.float(), each.factors.up.float(), low.float()))
