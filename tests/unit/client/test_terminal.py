"""Untrusted text as a terminal may show it."""

from __future__ import annotations

import json
import unicodedata

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from bottega.client.cli.logs import pretty
from bottega.client.cli.terminal import LONGEST, Line, escaped, escaped_and_cut

HIDDEN = ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a red star", "a red star"),
        ("[b]bold[/b] :smile: {x} %s", "[b]bold[/b] :smile: {x} %s"),
        ("\x1b[31mred\x9b0m", r"\x1b[31mred\x9b0m"),
        ("a\nb\rc\td\x00\x7f", r"a\nb\rc\td\x00\x7f"),
        ("\u202eevil \u2066x\u2069 \u200f", r"\u202eevil \u2066x\u2069 \u200f"),
        ("st\u200bar st\u200dar \ufeff\u2060\u00ad", r"st\u200bar st\u200dar \ufeff\u2060\xad"),
        ("line\u2028para\u2029next\x85", r"line\u2028para\u2029next\x85"),
        ("no unicode \udcff, private \ue000, tag \U000e0041", r"no unicode \udcff, private \ue000, tag \U000e0041"),
        ("filler \u3164\u115f\u2800", r"filler \u3164\u115f\u2800"),
        ("stern\ufe00 a\U000e0101", r"stern\ufe00 a\U000e0101"),
        ("größer ☆ 赤い星 красная звезда ⭐\ufe0f", "größer ☆ 赤い星 красная звезда ⭐\ufe0f"),
        ("👩\u200d🎨 می\u200cخواهم क\u094d\u200dष", "👩\u200d🎨 می\u200cخواهم क\u094d\u200dष"),
        ("\u200dstar", r"\u200dstar"),
        ("e\u0301", "e\u0301"),
    ],
)
def test_what_a_terminal_would_not_show_as_a_letter_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_towers_of_marks_end() -> None:
    assert escaped("a" + "\u0301" * 50).count("\u0301") == 4


def test_a_text_without_end_is_cut_and_says_so() -> None:
    cut = escaped("x" * (LONGEST + 5_000_000))
    assert cut.endswith(" ... (5000000 more letters)")
    assert len(cut) < LONGEST + 50


@given(st.text(max_size=200))
def test_nothing_hidden_is_left_of_any_text(text: str) -> None:
    shown = escaped(text)
    left = [letter for letter in shown if unicodedata.category(letter) in HIDDEN and letter not in "\u200c\u200d"]
    assert not left


@given(st.text(max_size=500), st.integers(2, 80))
def test_a_shortened_text_has_room_in_its_columns(text: str, width: int) -> None:
    shown = escaped_and_cut(text, width)
    assert cell_len(shown) <= width
    assert "\n" not in shown


def text_of(line: Line) -> str:
    return "".join(piece if isinstance(piece, str) else piece.text for piece in line)


def test_facts_of_a_log_line_cannot_pass_for_others_or_for_another_line() -> None:
    fields = {
        "time": "2026-01-02 10:00:00,000",
        "level": "INFO",
        "event": "job accepted",
        "request_id": "a\n10:00:00,001 ERROR gateway the disk is lost",
        "text": 'x level=ERROR worker="w1"',
        "worker": "w2",
    }
    (line,) = [text_of(row) for row in pretty("gateway", json.dumps(fields))]
    assert line.startswith("10:00:00,000 INFO    gateway      job accepted ")
    assert r'request_id="a\n10:00:00,001 ERROR gateway the disk is lost"' in line
    assert line.endswith(r'text="x level=ERROR worker=\"w1\"" worker=w2')


@pytest.mark.parametrize("line", ["[" * 60_000, '{"event": ' * 20_000, "no json \x1b[31m", "[1, 2]", '"text"'])
def test_a_line_of_anything_is_shown(line: str) -> None:
    assert list(pretty("gateway", line))


def test_a_style_is_no_part_of_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from bottega.client.cli.terminal import Styled, note, say

    say(Styled(text="\x1b[5mok", colour="green"), " [b]\n")
    note("error: \x1b", Styled(text="x", bold=True, dim=True))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("\\x1b[5mok [b]\\n\n", "error: \\x1bx\n")
    assert click.unstyle(shown.out) == shown.out
