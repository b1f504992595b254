"""Keys of configurations: their values, explanations, lines and secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import ConfigDict, Field

from bottega.config import load
from bottega.config_keys import MASK, explanations, keys_of, lines_of
from bottega.errors import ConfigError
from bottega.strict import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A door.

    width_m: of the frame; height_m: is none of its keys.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    width_m: Annotated[float, Field(gt=0)] = 1.0
    hub_token: Annotated[str, Field(max_length=12)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class House(Door):
    """doors, windows: how many
    it has. owner: a host:port, with width_m: 2 where it is wide."""

    doors: int = 1
    windows: int = 2
    owner: str = "localhost:1"
    front: Door = field(default_factory=Door)
    rooms: dict[str, str] = field(default_factory=dict)


def file_of(folder: Path, text: str) -> Path:
    file = folder / "house.yaml"
    file.write_text(text)
    return file


def test_a_docstring_explains_keys_also_those_of_the_class_above() -> None:
    said = explanations(House)
    assert said["doors"] == said["windows"] == "how many it has."
    assert said["owner"] == "a host:port, with width_m: 2 where it is wide."
    assert said["width_m"] == "of the frame; height_m: is none of its keys."
    assert "hub_token" not in said


def test_keys_have_their_sections_in_the_order_of_the_fields() -> None:
    names = [key.name for key in keys_of(House())]
    assert names == ["width_m", "hub_token", "doors", "windows", "owner", "front.width_m", "front.hub_token", "rooms"]


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    file = file_of(tmp_path, "# a house\ndoors: 3\n\nfront:\n  width_m: 2\nrooms: {hall: red}\n")
    expected = {("doors",): 2, ("front",): 4, ("front", "width_m"): 5, ("rooms",): 6, ("rooms", "hall"): 6}
    assert lines_of(file) == expected
    assert lines_of(file_of(tmp_path, "# nothing\n")) == {}


def test_secrets_are_masked_wherever_they_stand(tmp_path: Path) -> None:
    text = "front: {hub_token: hush}\nowner: https://me:hush@hub/x\nrooms: {api_key: hush, hall: 'http://hush@a'}\n"
    shown = {key.name: key.shown() for key in keys_of(load(House, file_of(tmp_path, text)))}
    assert "hush" not in str(shown)
    assert shown["front.hub_token"] == MASK
    assert shown["hub_token"] == "", "one that is not set is no secret"
    assert shown["owner"] == f"https://{MASK}@hub/x"


def test_what_is_wrong_with_a_secret_does_not_tell_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"front\.hub_token") as error:
        load(House, file_of(tmp_path, "front: {hub_token: hushhushhushhush}\n"))
    assert "hush" not in error.value.message


def test_a_key_that_is_there_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"front\.width_m: twice, in lines 2 and 4"):
        load(House, file_of(tmp_path, "front:\n  width_m: 2\n  hub_token: a\n  width_m: 3\n"))


def test_a_section_whose_keys_are_all_comments_has_its_defaults(tmp_path: Path) -> None:
    assert load(House, file_of(tmp_path, "doors: 3\nfront:\n  #width_m: 2\n")) == House(doors=3)


def test_a_key_without_a_value_is_no_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doors"):
        load(House, file_of(tmp_path, "doors:\n"))
