"""What counts as a word of a prompt, in languages with and without spaces."""

from __future__ import annotations

import pytest

from bottega.addons.cache.starts import has_enough_words, split_words


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("  a big red\tstar,\non the left ", 7),
        ("un café très noir", 4),
        ("une étoile", 2),
        ("大きな赤い星", 5),
        ("一颗红色的大星星", 4),
        ("แมวสีแดงตัวใหญ่", 4),
        ("빨간 별 하나", 3),
        ("a 红色 star", 3),
        ("", 0),
    ],
)
def test_words_are_separated_by_spaces_or_cut_where_a_script_has_none(prompt: str, words: int) -> None:
    assert len(split_words(prompt)) == words
    assert "".join(split_words(prompt)) == "".join(prompt.split())


def test_a_prompt_of_a_language_without_spaces_may_be_cached_as_any_other() -> None:
    assert has_enough_words("一颗红色的大星星在左边")
    assert not has_enough_words("红色")
    assert not has_enough_words("。、！？…")
    assert not has_enough_words("星 星 星")
