"""Escapes untrusted text for a terminal: characters that could control the terminal, hide or mislead become visible.

Prompts, names, error messages and log lines come over the network, from anybody.
"""

from __future__ import annotations

import unicodedata

LONGEST = 16_000
"""Characters of a text that are shown; an untrusted text may have some MiB."""
_CUT = " ... ({} more letters)"

# Unicode categories: control, format (bidirectional overrides and isolates, zero width), line and paragraph separators,
# lone surrogates, private use, and unassigned in this Python's Unicode version.
_HIDDEN = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"})
# Invisible characters of other categories: fillers, a joiner, vowels, the Braille blank.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
# Variation selectors. Emoji need two of them; the others are invisible here.
_SELECTORS = range(0xFE00, 0xFE10)
_USED_SELECTORS = "\ufe0e\ufe0f"
_MORE_SELECTORS = range(0xE0100, 0xE01F0)
# Joiners are valid between emoji and between letters of scripts without case, but not in Latin, Greek and Cyrillic.
_JOINERS = "\u200c\u200d"
_JOINED = frozenset({"So", "Sk", "Lo", "Mn", "Mc"})
# Languages put up to three marks on a letter; more would cover the lines above and below.
_MOST_MARKS = 4
_MARKS = frozenset({"Mn", "Me"})


def escaped(text: str) -> str:
    """Return a text as one line, in which invisible characters are escaped as in Python's string literals."""
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
    """Return the lines of a text that has several, such as a traceback, each escaped."""
    return [escaped(line.expandtabs()) for line in text.split("\n")]


def escaped_and_cut(text: str, width: int) -> str:
    """Return a text escaped, cut to the given columns of a terminal, and with white space as single spaces."""
    from rich.text import Text

    # Far more than fits into the columns, including white space and marks.
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
