r"""The keys of PEFT's alpha_pattern and rank_pattern, which name modules.

PEFT accepts any regular expression, but running an untrusted one is dangerous. Accepted here are a module's name and
what PEFT and its documentation write around it: `^` and `.*` before the name, `$` behind it, escaped characters in it.
They match as in PEFT, where a dot without a backslash stands for any character.
Source: PEFT's `get_pattern_key`, which searches for (.*\.)?(KEY)$, and its use of `re.escape` to write names as keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from bottega.errors import BadLora
from bottega.plain_text import excerpt

# Diffusers writes a key for each module whose alpha is not the most frequent one. SDXL's UNet has about 800 modules.
MAX_PATTERNS = 2048
MAX_CHARACTERS = 512
_SHOWN_CHARACTERS = 80

# Takes linear time: nothing in it can be matched in two ways.
_ACCEPTED = re.compile(r"(?P<begin>\^?)(?P<any>(?:\.\*)?)(?P<name>(?:[A-Za-z0-9_.-]|\\[.-])+)\$?")
_CHARACTERS = re.compile(r"\\?(.)")
_ANY = "."

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePattern:
    """A parsed key. It matches a whole path, or the end of a path behind a dot."""

    pieces: tuple[tuple[int, str], ...]
    """Parts of the name between wildcard characters, each with its offset in the name."""
    length: int
    """Length of the name."""
    whole: bool
    """Whether it matches whole paths only."""
    anywhere: bool
    """Whether any character may be before the name, not only a dot."""

    def matches(self, path: str) -> bool:
        """Return whether the key matches a module's path. Takes no longer than comparing two names."""
        before = len(path) - self.length
        if before < 0 or (before and self.whole):
            return False
        if before and not self.anywhere and path[before - 1] != ".":
            return False
        return all(path.startswith(piece, before + at) for at, piece in self.pieces)


def module_pattern(field: str, key: str) -> ModulePattern:
    """Return the parsed key of a field. Raises BadLora for a key that is not accepted."""
    match = _ACCEPTED.fullmatch(key) if len(key) <= MAX_CHARACTERS else None
    if match is None:
        raise BadLora(
            f"{field} '{excerpt(key, _SHOWN_CHARACTERS)}' is not accepted: untrusted regular expressions are not run. "
            f"Write names of modules, of at most {MAX_CHARACTERS} characters; ^ or .* may be before a name, and $ "
            "behind it"
        )
    characters = [(found[0] == _ANY, found[1]) for found in _CHARACTERS.finditer(match["name"])]
    anywhere = bool(match["any"])
    return ModulePattern(
        pieces=tuple(_pieces(characters)),
        length=len(characters),
        whole=bool(match["begin"]) and not anywhere,
        anywhere=anywhere,
    )


def module_patterns(field: str, numbers: Mapping[str, _Number]) -> tuple[tuple[str, ModulePattern, _Number], ...]:
    """Return the keys of a field in their order, each with its pattern and number.

    Raises BadLora for a key that is not accepted, and for too many keys.
    """
    if len(numbers) > MAX_PATTERNS:
        raise BadLora(f"{field} has {len(numbers)} keys; at most {MAX_PATTERNS} are accepted")
    return tuple((key, module_pattern(field, key), number) for key, number in numbers.items())


def _pieces(characters: Iterable[tuple[bool, str]]) -> Iterator[tuple[int, str]]:
    """Yield the runs of characters that are not wildcards, each with its offset."""
    placed = enumerate(characters)
    for is_wildcard, run in groupby(placed, key=lambda item: item[1][0]):
        if not is_wildcard:
            piece = list(run)
            yield piece[0][0], "".join(character for _, (_, character) in piece)
