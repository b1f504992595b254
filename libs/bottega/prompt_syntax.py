r"""The syntax of weighted prompts: that of AUTOMATIC1111's web UI, without its prompts that change between steps.

`(word)` multiplies the weight of a word by 1.1, `[word]` divides it by 1.1, `(word:1.3)` multiplies it by 1.3, and
brackets may be nested. `\(`, `\)`, `\[`, `\]` and `\\` are the characters themselves. `BREAK`, in capitals, begins a
new chunk of tokens. As in the web UI, an opening bracket that is never closed counts up to the end of the prompt, and a
closing one that was never opened is text.

`BREAK` inside brackets begins a chunk too; the web UI reads it as a word with a negative weight there. What the web UI
would draw in another way than by weights is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_PROMPT_CHUNKS = 20
"""Largest number of chunks of a prompt: 1,500 tokens. The work of attention to the prompt grows with it."""

# Texts between brackets, colons and escapes. The longest prompt has half as many tokens. The gateway's event loop reads
# prompts, so that no text may take long: one of 16 KiB takes up to 0.01 s.
_MAX_PARTS = 3000

MAX_WEIGHT = 100.0
"""Largest weight of a word, and the smallest below zero. Half precision has values up to 65,504."""

# Brackets that are open at once, which is a factor of 9.8. The time to read a prompt grows with it.
_MAX_DEPTH = 24

_STEP = 1.1

# Characters of the prompt in a message.
_SHOWN = 40

_PIECES = re.compile(
    r"""
    \\[()\[\]\\]                      # an escaped character
    | \\                              # a backslash that escapes nothing, which has no effect
    | [(\[)\]]
    | :\s*(?P<weight>[+-]?[.\d]+)\s*\)
    | [^\\()\[\]:]+
    | :
    """,
    re.VERBOSE,
)
_BREAK = re.compile(r"\bBREAK\b")
_AND = re.compile(r"\bAND\b")
_TAG = re.compile(r"<(lora|lyco|hypernet):[^<>]{0,200}>", re.IGNORECASE)
# At the end of the text in square brackets: the step or the share of steps at which a prompt changes.
_SCHEDULE = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedText:
    """A part of a prompt whose words have one weight."""

    text: str
    weight: float


class MalformedPrompt(ValueError):
    """A weighted prompt that cannot be drawn. The message completes a sentence that begins with the prompt's field."""


def parse_weighted(prompt: str) -> list[list[WeightedText]]:
    """Return the sections of a prompt between its BREAKs, each with its texts in order.

    Neighbours of equal weight are one text. A section may be empty.

    Raises:
        MalformedPrompt: The prompt cannot be drawn.
    """
    if _AND.search(prompt):
        raise MalformedPrompt("has AND, which joins prompts in other tools: write it in lower case, or send one prompt")
    if tag := _TAG.search(prompt):
        raise MalformedPrompt(f"has {tag[0][:_SHOWN]!r}: name LoRAs in the field loras, not in the prompt")
    parser = _Parser(prompt)
    for piece in _PIECES.finditer(prompt):
        parser.read(piece)
    sections = list(parser.sections())
    if len(sections) > MAX_PROMPT_CHUNKS:
        raise MalformedPrompt(f"has {len(sections) - 1} BREAKs: at most {MAX_PROMPT_CHUNKS - 1} are drawn")
    return sections


class _Parser:
    """Reads the pieces of a prompt in order.

    Attributes:
        _parts: Text and weight of each part; a BREAK is None.
        _round: Number of parts before each open round bracket.
        _square: The same, and the position of the text in the brackets, for each open square bracket.
        _bar: Position of the last `|` that is not escaped; -1 for none.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._parts: list[tuple[str, float] | None] = []
        self._round: list[int] = []
        self._square: list[tuple[int, int]] = []
        self._bar = -1

    def read(self, piece: re.Match[str]) -> None:
        text, weight = piece[0], piece["weight"]
        if text.startswith("\\"):
            self._parts.append((text[1:], 1.0))
        elif text == "(":
            self._round.append(len(self._parts))
        elif text == "[":
            self._square.append((len(self._parts), piece.end()))
        elif weight is not None and self._round:
            self._multiply(self._round.pop(), _number(weight))
        elif text == ")" and self._round:
            self._multiply(self._round.pop(), _STEP)
        elif text == "]" and self._square:
            first, begin = self._square.pop()
            self._check_unchanging(begin, piece.start())
            self._multiply(first, 1 / _STEP)
        else:
            self._note_bar(piece)
            self._read_text(text)
        if len(self._round) + len(self._square) > _MAX_DEPTH:
            raise MalformedPrompt(f"has over {_MAX_DEPTH} brackets that are open at once")
        if len(self._parts) > _MAX_PARTS:
            raise MalformedPrompt(f"has over {_MAX_PARTS} texts between brackets, colons and escapes")

    def sections(self) -> Iterator[list[WeightedText]]:
        """Yield the sections, after the last piece. Brackets that are still open end here."""
        for first in self._round:
            self._multiply(first, _STEP)
        for first, _ in self._square:
            self._multiply(first, 1 / _STEP)
        section: list[tuple[str, float]] = []
        for part in [*self._parts, None]:
            if part is None:
                yield list(_merged(section))
                section = []
            else:
                section.append(part)

    def _read_text(self, text: str) -> None:
        texts = _BREAK.split(text)
        for place, part in enumerate(texts):
            if place:
                self._parts.append(None)
                part = part.lstrip()  # noqa: PLW2901
            self._parts.append((part.rstrip() if place + 1 < len(texts) else part, 1.0))

    def _note_bar(self, piece: re.Match[str]) -> None:
        bar = piece[0].rfind("|")
        if bar > 0 or (bar == 0 and not self._prompt.endswith("\\", 0, piece.start())):
            self._bar = piece.start() + bar

    def _check_unchanging(self, begin: int, end: int) -> None:
        """Raise MalformedPrompt if a text in square brackets is one that the web UI changes between steps."""
        colon = self._prompt.rfind(":", begin, end)
        scheduled = (
            colon >= 0
            and not self._prompt.endswith("\\", 0, colon)
            and _SCHEDULE.fullmatch(self._prompt[colon + 1 : end].strip())
        )
        if not scheduled and self._bar < begin:
            return
        rule = "prompts that change between steps, such as [from:to:0.5] and [one|other], are not served"
        raise MalformedPrompt(f"has {self._prompt[begin - 1 : end + 1][:_SHOWN]!r}: {rule}")

    def _multiply(self, first: int, factor: float) -> None:
        for place in range(first, len(self._parts)):
            if (part := self._parts[place]) is not None:
                self._parts[place] = (part[0], part[1] * factor)


def _merged(parts: Sequence[tuple[str, float]]) -> Iterator[WeightedText]:
    """Yield the parts, those of one weight in a row as one."""
    texts: list[str] = []
    for place, (text, weight) in enumerate(parts):
        texts.append(text)
        if place + 1 < len(parts) and parts[place + 1][1] == weight:
            continue
        if joined := "".join(texts):
            if not abs(weight) <= MAX_WEIGHT:
                where = joined.strip()[:_SHOWN]
                raise MalformedPrompt(f"has the weight {weight:.4g} at {where!r}: at most {MAX_WEIGHT:g} is drawn")
            yield WeightedText(text=joined, weight=weight)
        texts = []


def _number(weight: str) -> float:
    try:
        return float(weight)
    except ValueError:
        raise MalformedPrompt(f"has the weight {weight[:_SHOWN]}, which is not a number") from None
