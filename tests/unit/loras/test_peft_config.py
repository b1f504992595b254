"""Keys of PEFT's alpha_pattern mean the modules that PEFT takes them for, and no untrusted expression is run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from bottega.errors import BadLora
from bottega.loras.importing.peft_config import (
    MAX_CHARACTERS,
    MAX_PATTERNS,
    from_metadata,
    module_pattern,
    read_adapter_config,
)
from tests.samples.lora_files import base_shapes

_MODULES = sorted(base_shapes("unet"))
_NAMES = st.text("ab0_.-", min_size=1, max_size=8)
_PATHS = st.text("ab0_.-", min_size=1, max_size=12) | st.sampled_from(_MODULES)
# What PEFT, Diffusers and PEFT's documentation write, and people after them.
_WRITTEN = st.sampled_from(["{}", "^{}", "{}$", "^{}$", ".*{}", ".*.{}", r".*\.{}", r"^.*\.{}$"])


@st.composite
def _keys(draw: st.DrawFn) -> str:
    name = draw(_NAMES)
    escaped = re.escape(name) if draw(st.booleans()) else name
    return draw(_WRITTEN).format(escaped)


@given(st.lists(_keys(), min_size=1, max_size=4, unique=True), st.lists(_PATHS, min_size=1))
def test_of_several_keys_the_one_that_peft_finds_counts(keys: list[str], paths: list[str]) -> None:
    alphas = {key: float(number) for number, key in enumerate(keys, start=1)}
    config = read_adapter_config(json.dumps({"lora_alpha": -1, "alpha_pattern": alphas}).encode())
    for path in paths:
        assert config.scale(path, 1) == alphas.get(get_pattern_key(keys, path), -1)


@given(st.sampled_from(_MODULES), st.integers(0, 80), _WRITTEN, st.booleans())
def test_ends_of_a_models_own_names_match_what_peft_matches(path: str, cut: int, written: str, escape: bool) -> None:
    name = path[cut:] or path
    key = written.format(re.escape(name) if escape else name)
    pattern = module_pattern("alpha_pattern", key)
    for other in _MODULES:
        assert pattern.matches(other) == (get_pattern_key([key], other) == key), (key, other)


_EXPRESSIONS = ("(a+)+$", "to_q|to_k", ".*attn.*", "to_[qk]", "a{1000}{1000}", "(?=x)", r"\d+", r"(a)\1", "(", "ü")


@pytest.mark.parametrize("expression", [*_EXPRESSIONS, "", "^", ".*", "$", "a\n", "a$$", "a" * (MAX_CHARACTERS + 1)])
def test_any_other_expression_is_refused_by_name(expression: str) -> None:
    for read in (_in_a_configuration, _in_metadata):
        with pytest.raises(BadLora, match="alpha_pattern '") as refusal:
            read({expression: 1.0})
        assert len(refusal.value.message) < 500


def test_what_a_refusal_repeats_is_plain_text() -> None:
    nasty = "\x1b[2J\r\n[/b]\u202e"
    told: list[tuple[Callable[[Mapping[str, object]], None], Mapping[str, object]]] = [
        (_in_a_configuration, {f"{nasty}(": 1.0}),
        (_in_a_configuration, {nasty * 10_000: "much"}),
        (_in_metadata, {nasty * 10_000: "much"}),
    ]
    for read, alphas in told:
        with pytest.raises(BadLora) as refusal:
            read(alphas)
        assert refusal.value.message.isascii()
        assert refusal.value.message.isprintable()
        assert len(refusal.value.message) < 500
    for field in ("peft_type", "init_lora_weights"):
        with pytest.raises(BadLora) as refusal:
            read_adapter_config(json.dumps({field: f"pissa{nasty}"}).encode())
        assert refusal.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"\xff\xfe\x00", "it is not text in UTF-8"),
        (b'{"r": 4,\n}', "it is not JSON: line 2, column 1"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"r": ' + b"9" * 5000 + b"}", "it has a number with too many digits"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_in_plain_words(text: bytes, reason: str) -> None:
    with pytest.raises(BadLora) as refusal:
        read_adapter_config(text)
    assert refusal.value.message == f"adapter_config.json cannot be used: {reason}"


@pytest.mark.parametrize("rank", [0, -3, 10**400])
def test_a_rank_by_which_no_alpha_can_be_divided_is_refused(rank: int) -> None:
    """A module of whole factors has no other rank than that, and the process of the import ended."""
    for field in ({"r": rank}, {"rank_pattern": {"to_q": rank}}):
        with pytest.raises(BadLora, match=r"adapter_config\.json cannot be used: r"):
            read_adapter_config(json.dumps({"peft_type": "LOKR", **field}).encode())


def test_keys_are_counted() -> None:
    most = {f"block.{number}": 1.0 for number in range(MAX_PATTERNS)}
    _in_a_configuration(most)
    with pytest.raises(BadLora, match=f"{MAX_PATTERNS + 1} keys; at most {MAX_PATTERNS}"):
        _in_a_configuration({**most, "one.more": 1.0})


def test_fields_of_peft_whose_expressions_are_not_needed_may_say_anything() -> None:
    hostile = "(a+)+$" * 500
    config = {
        "lora_alpha": 3,
        "fan_in_fan_out": True,  # it means nothing for linear layers
        "target_modules": hostile,
        "exclude_modules": hostile,
        "layers_pattern": hostile,
        "rank_pattern": {hostile: 3},
    }
    assert read_adapter_config(json.dumps(config).encode()).scale("a" * 200, 1) == 3


def test_as_many_keys_as_there_may_be_are_looked_through_in_seconds() -> None:
    """With names of a model, so that the keys fail as late as they can."""
    paths = [f"down_blocks.{n // 100}.attentions.0.transformer_blocks.{n % 100}.attn1.to_q" for n in range(250)]
    keys = [f"{number}{path}" for number in range(12) for path in paths][:MAX_PATTERNS]
    assert len(keys) == MAX_PATTERNS
    config = read_adapter_config(json.dumps({"alpha_pattern": dict.fromkeys(keys, 2.0)}).encode())
    began_s = time.process_time()
    assert {config.scale(path, 1) for path in paths} == {8.0}, "PEFT's default"
    assert time.process_time() - began_s < 15 / 4, "a thousand take four times as long"


def _in_a_configuration(alphas: Mapping[str, object]) -> None:
    read_adapter_config(json.dumps({"alpha_pattern": alphas}).encode())


def _in_metadata(alphas: Mapping[str, object]) -> None:
    from_metadata({"lora_adapter_metadata": json.dumps({"unet.alpha_pattern": alphas})})
