"""The stream of prompts has the shape that it says it has."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from bottega.miniature.scenes import COLOURS, SHAPES
from load.replay.prompt_stream import StreamShape, prompts

one_user = partial(StreamShape, users=1, drift=0.0)


def _words(prompt: str) -> Counter[str]:
    """The shapes and colours that it names; captions that leave things out name fewer."""
    return Counter(word for word in prompt.split() if word in SHAPES or word in COLOURS)


def test_a_stream_is_the_same_each_time_and_another_one_with_another_seed() -> None:
    first = prompts(2000, StreamShape(), seed=1)
    assert len(first) == 2000
    assert first == prompts(2000, StreamShape(), seed=1)
    assert first[:500] == prompts(500, StreamShape(), seed=1)
    assert first != prompts(2000, StreamShape(), seed=2)


def test_topics_are_as_popular_as_their_ranks_say() -> None:
    """Sessions of one prompt: the topics' own."""
    drawn = Counter(prompts(20_000, one_user(session=1.0, topics=50), seed=3))
    seen = [count for _, count in drawn.most_common()]
    assert len(seen) == 50
    whole = sum(1 / rank for rank in range(1, 51))
    assert [count / 20_000 for count in seen[:3]] == pytest.approx([1 / whole, 1 / 2 / whole, 1 / 3 / whole], rel=0.1)


def test_a_refined_prompt_differs_in_one_part_and_a_rephrased_one_in_none() -> None:
    def most_changed(again: float, rephrased: float) -> list[int]:
        shape = one_user(session=1e9, again=again, rephrased=rephrased)
        said = [_words(prompt) for prompt in prompts(400, shape, seed=6)]
        most = max(words.total() for words in said)
        whole = [words for words in said if words.total() == most]
        return sorted({(after - before).total() for before, after in pairwise(whole) if before and after})

    assert most_changed(0.0, 1.0) == [0]
    refined = most_changed(0.0, 0.0)
    assert 1 in refined
    assert max(refined) <= 3, "two prompts that leave something out may lie between two that do not"
