"""Policies by their definitions, and the heap against a list that is sorted anew each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.cache.eviction import FIFO, LCBFU, LFU, LRU, EvictionHeap, EvictionPolicy, Usage, decayed_lcbfu

HALF_LIFE = 8.0
POLICIES = [LCBFU, decayed_lcbfu(HALF_LIFE), LRU, LFU, FIFO]


def test_decayed_scores_stay_apart_on_the_clock_of_a_long_life() -> None:
    heap = EvictionHeap[str](decayed_lcbfu(3600.0))
    for name, at in (("second", 1.8e9 + 0.001), ("first", 1.8e9)):
        heap.add(name, Usage(frequency=1.0, step=5, used_at=at, created_at=at))
    assert heap.evict(0) == ["first", "second"]


def test_a_batch_goes_down_to_the_bytes_that_may_stay() -> None:
    heap = EvictionHeap[int](LCBFU)
    for step in range(1, 11):
        heap.add(step, Usage(frequency=1.0, step=step), size_bytes=100)
    assert heap.evict(1000) == []
    assert heap.evict(720) == [1, 2, 3]
    assert heap.size_bytes == 700
    assert [name in heap for name in (3, 4)] == [False, True]
    assert heap.evict(-1) == [4, 5, 6, 7, 8, 9, 10]
    assert (len(heap), heap.size_bytes) == (0, 0)


def test_what_is_unknown_or_known_already_is_refused() -> None:
    heap = EvictionHeap[str](LCBFU)
    heap.add("a", Usage())
    with pytest.raises(ValueError, match="'a'"):
        heap.add("a", Usage())
    calls: list[Callable[[], object]] = [lambda: heap.use("b", 0.0), lambda: heap.usage("b"), lambda: heap.remove("b")]
    for call in calls:
        with pytest.raises(KeyError):
            call()
    with pytest.raises(ValueError, match="half-life"):
        decayed_lcbfu(0.0)


def test_an_item_that_comes_back_has_the_place_of_its_new_self() -> None:
    heap = EvictionHeap[str](LFU)
    heap.add("back", Usage(frequency=1.0))
    heap.remove("back")
    heap.add("back", Usage(frequency=9.0))
    heap.add("other", Usage(frequency=5.0))
    assert heap.evict(0) == ["other", "back"]


def test_items_that_come_and_go_leave_no_places_behind() -> None:
    heap = EvictionHeap[int](LRU)
    for number in range(5000):
        heap.add(number, Usage(used_at=number))
        if number >= 10:
            heap.remove(number - 10)
    assert len(heap) == 10
    assert len(heap._places) < 200


class _Sorted:
    """The same without a heap: every use is kept, and scores are as the paper defines them, at the time of eviction."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.items: dict[int, tuple[int, int, list[float]]] = {}

    def score(self, name: int, now: float) -> float:
        step, _, times = self.items[name]
        uses = times[1:]
        worth: float = sum(0.5 ** ((now - at) / HALF_LIFE) for at in uses)
        scores = {"lcbfu": len(uses) * step, "lru": times[-1], "lfu": len(uses), "fifo": times[0]}
        return scores.get(self.policy.name, worth * step)

    def evict(self, until_bytes: int, now: float) -> list[int]:
        gone = []
        while sum(size for _, size, _ in self.items.values()) > until_bytes:
            # Equal scores differ by rounding: they are told apart by their last use, then by their age.
            least = min(self.items, key=lambda name: (round(self.score(name, now), 9), self.items[name][2][-1], name))
            del self.items[least]
            gone.append(least)
        return gone


_steps = st.sampled_from([5, 10, 15, 20, 25])
_actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _steps, st.integers(1, 3)),
        st.tuples(st.just("use"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("evict"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(actions=_actions)
def test_the_heap_evicts_what_a_list_sorted_each_time_would(
    policy: EvictionPolicy, actions: list[tuple[str, int, int]]
) -> None:
    heap, plain = EvictionHeap[int](policy), _Sorted(policy)
    for now, (action, what, size) in enumerate(actions):
        names = sorted(plain.items)
        if action == "add":
            heap.add(now, Usage(step=what, used_at=now, created_at=now), size_bytes=size)
            plain.items[now] = (what, size, [float(now)])
        elif action == "evict":
            assert heap.evict(what) == plain.evict(what, now)
        elif names and action == "use":
            heap.use(names[what % len(names)], now)
            plain.items[names[what % len(names)]][2].append(float(now))
        elif names:
            heap.remove(names[what % len(names)])
            del plain.items[names[what % len(names)]]
        assert heap.size_bytes == sum(size for _, size, _ in plain.items.values())
        assert len(heap) == len(plain.items)
    assert heap.evict(0) == plain.evict(0, len(actions))
