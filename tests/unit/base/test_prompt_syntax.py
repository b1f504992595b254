"""Weighted prompts mean what they mean in AUTOMATIC1111's web UI, or are refused in one sentence."""

from __future__ import annotations

import contextlib
import time

import pytest

from bottega.prompt_syntax import MAX_PROMPT_CHUNKS, MalformedPrompt, parse_weighted
from bottega.rules import check_texts
from bottega.v1.generation_pb2 import PROMPT_SYNTAX_WEIGHTED, GenerationSpec

# Characters of the longest prompt that a request may have.
LONGEST = 16 << 10


def parsed(prompt: str) -> list[list[tuple[str, float]]]:
    return [[(part.text, part.weight) for part in section] for section in parse_weighted(prompt)]


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        # The examples of the web UI's own parser.
        ("normal text", [("normal text", 1.0)]),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        (r"\(literal\]", [("(literal]", 1.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1.0),
                ("house", 1.573),
                (" ", 1.1),
                ("on", 1.0),
                (" a ", 1.1),
                ("hill", 0.55),
                (", sun, ", 1.1),
                ("sky", 1.4641),
                (".", 1.1),
            ],
        ),
        ("[[faint]]", [("faint", 1 / 1.21)]),
        ("(a:-.5) b", [("a", -0.5), (" b", 1.0)]),
        ("( a : 2 )", [(" a ", 2.0)]),
        ("closed) twice] :2)", [("closed) twice] :2)", 1.0)]),
        ("[a: b]", [("a: b", 1 / 1.1)]),
        (r"a\b \\ [\|]", [("ab \\ ", 1.0), ("|", 1 / 1.1)]),
        ("(a", [("a", 1.1)]),
        ("(a:1e3)", [("a:1e3", 1.1)]),
        ("", []),
    ],
)
def test_brackets_weigh_as_in_the_web_ui(prompt: str, parts: list[tuple[str, float]]) -> None:
    (section,) = parsed(prompt)
    assert [text for text, _ in section] == [text for text, _ in parts]
    assert [weight for _, weight in section] == pytest.approx([weight for _, weight in parts], rel=1e-12)


@pytest.mark.parametrize(
    ("prompt", "sections"),
    [
        ("a BREAK b", [[("a", 1.0)], [("b", 1.0)]]),
        ("aBREAK break", [[("aBREAK break", 1.0)]]),
        ("BREAK  BREAK b", [[], [], [("b", 1.0)]]),
        ("a BREAK", [[("a", 1.0)], []]),
        ("(a BREAK b:2) c", [[("a", 2.0)], [("b", 2.0), (" c", 1.0)]]),
    ],
)
def test_break_begins_a_section(prompt: str, sections: list[list[tuple[str, float]]]) -> None:
    assert parsed(prompt) == sections


CHANGES = "prompts that change between steps, such as [from:to:0.5] and [one|other], are not served"
REFUSALS = {
    "(a:1.2.3)": "has the weight 1.2.3, which is not a number",
    "(a:101)": "has the weight 101 at 'a': at most 100 is drawn",
    "(((b:10):10):-10)": "has the weight -1000 at 'b': at most 100 is drawn",
    "(" * 1000 + "a": "has over 24 brackets that are open at once",
    "[(" * 500 + "a": "has over 24 brackets that are open at once",
    "a BREAK " * MAX_PROMPT_CHUNKS: "has 20 BREAKs: at most 19 are drawn",
    "(a)b" * 4000: "has over 3000 texts between brackets, colons and escapes",
    "a [cat:dog:0.5]": f"has '[cat:dog:0.5]': {CHANGES}",
    "[(a:2):10]": f"has '[(a:2):10]': {CHANGES}",
    "[cat:dog:1e-1]": f"has '[cat:dog:1e-1]': {CHANGES}",
    f"[cat:dog:{' ' * 70}0.5]": f"has '[cat:dog:{' ' * 31}': {CHANGES}",
    "[a|b] c": f"has '[a|b]': {CHANGES}",
    "a AND b": "has AND, which joins prompts in other tools: write it in lower case, or send one prompt",
    "a <lora:ink:0.8>": "has '<lora:ink:0.8>': name LoRAs in the field loras, not in the prompt",
}


@pytest.mark.parametrize("prompt", REFUSALS, ids=lambda prompt: str(prompt)[:20])
def test_what_cannot_be_drawn_is_refused_in_one_sentence(prompt: str) -> None:
    with pytest.raises(MalformedPrompt) as caught:
        parse_weighted(prompt)
    assert str(caught.value) == REFUSALS[prompt]
    spec = GenerationSpec(prompt="a", negative_prompt=prompt, prompt_syntax=PROMPT_SYNTAX_WEIGHTED)
    (violation,) = check_texts(spec)
    assert (violation.field, violation.description) == ("spec.negative_prompt", REFUSALS[prompt])
    spec.ClearField("prompt_syntax")
    assert not list(check_texts(spec))


def test_texts_that_together_take_long_to_read_are_refused_together() -> None:
    spec = GenerationSpec(prompt="a", prompt_syntax=PROMPT_SYNTAX_WEIGHTED, prompts=["[]" * 1024] * 4)
    assert not list(check_texts(spec))
    spec.negative_prompt = "(a"
    (violation,) = check_texts(spec)
    assert violation.field == "spec.prompt_syntax"
    spec.ClearField("prompt_syntax")
    assert not list(check_texts(spec))


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        ")",
        "(a",
        "()",
        "[:",
        ": ",
        " BREAK",
        "\\",
        "1",
        "[1:",
        "<lora:",
        "(a:1",
    ],
)
def test_no_long_prompt_takes_long_to_read(piece: str) -> None:
    prompt = "[(" * 11 + piece * (LONGEST // len(piece))
    began_s = time.process_time()
    with contextlib.suppress(MalformedPrompt):
        parse_weighted(prompt)
    assert time.process_time() - began_s < 0.5
