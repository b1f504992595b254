"""Splits prompts into words, also in languages without spaces between words."""

from __future__ import annotations

import re

# Scripts without spaces between words, each with about as many characters as its words have on average.
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_SOUTH_EAST_ASIAN = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(
    f"[{_HAN}]{{1,2}}|[{_KANA}]{{1,3}}|[{_SOUTH_EAST_ASIAN}]{{1,4}}|[^\\s{_HAN}{_KANA}{_SOUTH_EAST_ASIAN}]+"
)


def split_words(prompt: str) -> list[str]:
    """Return the words of a prompt.

    White space separates them. Text in a script without spaces, such as Chinese, Japanese or Thai, is cut into pieces
    of a usual word's length.
    """
    return _WORD.findall(prompt)
