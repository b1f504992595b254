"""Which prompts are measured with each other."""

from __future__ import annotations

from collections import Counter

from bottega.client.addons.cache.samples import PromptPair, miniature_pairs, pairs_of_file, thin_out
from bottega.miniature.scenes import read_caption
from bottega.planning import count_words


def test_lines_make_pairs_with_the_line_before_unless_one_is_empty_or_short() -> None:
    text = "one star\none red star\none big star\n\na dog sits\n  a dog on the moon \na dog on the moon\na cat sits\n"

    assert pairs_of_file(text) == [
        PromptPair(first="one red star", second="one big star"),
        PromptPair(first="a dog sits", second="a dog on the moon"),
        PromptPair(first="a dog on the moon", second="a cat sits"),
    ]


def test_the_embedded_models_pairs_are_sentences_that_the_oracle_reads_and_differ() -> None:
    pairs = miniature_pairs(200)

    assert all(read_caption(pair.first) and read_caption(pair.second) for pair in pairs)
    assert all(pair.first != pair.second for pair in pairs)
    # Both lengths of prompts have enough of them.
    long = sum(count_words(pair.second) > 15 for pair in pairs)
    assert long >= 40
    things = Counter(len(scene.things) for pair in pairs if (scene := read_caption(pair.second)))
    assert things == {1: 100, 2: 100}


def test_more_pairs_begin_with_the_same_ones() -> None:
    assert miniature_pairs(30)[:20] == miniature_pairs(20)


def test_too_many_pairs_are_thinned_out_over_all_of_them() -> None:
    pairs = [PromptPair(first=str(number), second="x") for number in range(10)]

    assert [pair.first for pair in thin_out(pairs, 4)] == ["0", "2", "5", "7"]
    assert thin_out(pairs, 10) == pairs
