"""Untrusted text as a terminal may show it: what could steer the terminal, hide or pretend becomes visible.

Prompts, names, error messages and log lines come over the wire, and from anybody.
"""

from __future__ import annotations

import unicodedata

# Of one text: beyond that it is no message any more, and an untrusted one may have some MiB.
LONGEST = 16_000
_CUT = " ... ({} more letters)"

# Control, format (bidirectional overrides and isolates, zero width), line and paragraph separators, lone surrogates,
# private use, and what this Python's Unicode does not know.
_HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"})
# Letters, marks and symbols of other categories that show nothing: fillers, a joiner, vowels, the blank of Braille.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
# That choose between two looks, which emoji need; more of them, which fonts for Chinese names have, show nothing here.
_SELECTORS = range(0xFE00, 0xFE10)
_USED_SELECTORS = "\ufe0e\ufe0f"
_MORE_SELECTORS = range(0xE0100, 0xE01F0)
# Emoji, and the letters of scripts that are written with joiners, have these between them; Latin, Greek and Cyrillic
# letters have case, and so do not.
_JOINERS = "\u200c\u200d"
_JOINED = frozenset({"So", "Sk", "Lo", "Mn", "Mc"})
# Languages have up to three on one letter; towers of them cover the lines above and below.
_MOST_MARKS = 4
_MARKS = frozenset({"Mn", "Me"})


def escaped(text: str) -> str:
    """One line; what a terminal would not show as a letter is escaped as in Python's literals, such as \\x1b."""
    if text.isascii() and text.isprintable() and len(text) <= LONGEST:
        return text
    shown, marks = [], 0
    for index, letter in enumerate(text[:LONGEST]):
        marks = marks + 1 if unicodedata.category(letter) in _MARKS else 0
        hidden = marks > _MOST_MARKS or _is_hidden(text, index)
        shown.append(letter.encode("unicode_escape").decode() if hidden else letter)
    if len(text) > LONGEST:
        shown.append(_CUT.format(len(text) - LONGEST))
    return "".join(shown)


def escaped_lines(text: str) -> list[str]:
    """The lines of a text that has several for good reason, such as a traceback, each one plain."""
    return [escaped(line.expandtabs()) for line in text.split("\n")]


def escaped_and_cut(text: str, width: int) -> str:
    """Plain, in at most so many columns of a terminal, and its white space as single spaces."""
    from rich.text import Text

    # Far more than columns have room for, white space and marks included.
    begun = text[: 20 * width]
    shown = Text(escaped(" ".join(begun.split())))
    if len(begun) < len(text):
        shown.append("…")
    shown.truncate(width, overflow="ellipsis")
    return shown.plain


def _is_hidden(text: str, index: int) -> bool:
    letter = text[index]
    if letter in _JOINERS:
        return not all(_is_joined(near) for near in (text[index - 1 : index], text[index + 1 : index + 2]))
    if ord(letter) in _SELECTORS:
        return letter not in _USED_SELECTORS
    return unicodedata.category(letter) in _HIDDEN or letter in _BLANK or ord(letter) in _MORE_SELECTORS


def _is_joined(letter: str) -> bool:
    return letter != "" and unicodedata.category(letter) in _JOINED
