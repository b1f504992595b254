"""Which modules a key of PEFT's alpha_pattern or rank_pattern names. PEFT takes any regular expression; an untrusted
one is never run here.

What is accepted is a module's name, and around it what PEFT and its documentation write: `^` and `.*` before it, `$`
behind it, escaped characters in it. It matches as in PEFT, where a dot that is not escaped stands for any character.
Source: PEFT's `get_pattern_key`, which looks for (.*\\.)?(KEY)$, and `re.escape`, by which it writes names as keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from bottega.errors import BadLora
from bottega.plain_text import excerpt

# Diffusers writes a key for each module whose alpha is not the most frequent one; SDXL's UNet has some 800 modules.
MAX_PATTERNS = 2048
MAX_CHARACTERS = 512
_SHOWN_CHARACTERS = 80

# Linear: nothing in it can be matched in two ways.
_TAKEN = re.compile(r"(?P<begin>\^?)(?P<any>(?:\.\*)?)(?P<name>(?:[A-Za-z0-9_.-]|\\[.-])+)\$?")
_CHARACTERS = re.compile(r"\\?(.)")
_ANY = "."

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePattern:
    """One key. pieces: of the name between the characters that may be any, and where each begins.

    length: of the name. whole: only the whole path; anywhere: whatever is before the name; else a dot is.
    """

    pieces: tuple[tuple[int, str], ...]
    length: int
    whole: bool
    anywhere: bool

    def matches(self, path: str) -> bool:
        """Whether it names the module at that path. Takes no longer than comparing two names."""
        before = len(path) - self.length
        if before < 0 or (before and self.whole):
            return False
        if before and not self.anywhere and path[before - 1] != ".":
            return False
        return all(path.startswith(piece, before + at) for at, piece in self.pieces)


def module_pattern(field: str, key: str) -> ModulePattern:
    """Return what a key of a field matches. Raise BadLora naming one that is not taken."""
    taken = _TAKEN.fullmatch(key) if len(key) <= MAX_CHARACTERS else None
    if taken is None:
        raise BadLora(
            f"{field} '{excerpt(key, _SHOWN_CHARACTERS)}' is not taken: regular expressions of strangers are not "
            f"run. Write names of modules, of at most {MAX_CHARACTERS} characters; ^ or .* may be before a name, and $ "
            "behind it"
        )
    characters = [(found[0] == _ANY, found[1]) for found in _CHARACTERS.finditer(taken["name"])]
    anywhere = bool(taken["any"])
    return ModulePattern(
        pieces=tuple(_pieces(characters)),
        length=len(characters),
        whole=bool(taken["begin"]) and not anywhere,
        anywhere=anywhere,
    )


def module_patterns(field: str, numbers: Mapping[str, _Number]) -> tuple[tuple[str, ModulePattern, _Number], ...]:
    """Return the keys of a field with what they match and their numbers, in their order.

    Raise BadLora as module_pattern does, and where there are too many.
    """
    if len(numbers) > MAX_PATTERNS:
        raise BadLora(f"{field} has {len(numbers)} keys; at most {MAX_PATTERNS} are accepted")
    return tuple((key, module_pattern(field, key), number) for key, number in numbers.items())


def _pieces(characters: Iterable[tuple[bool, str]]) -> Iterator[tuple[int, str]]:
    """What stands between those that may be any, and where."""
    placed = enumerate(characters)
    for may_be_any, run in groupby(placed, key=lambda each: each[1][0]):
        if not may_be_any:
            piece = list(run)
            yield piece[0][0], "".join(character for _, (_, character) in piece)
