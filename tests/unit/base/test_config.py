"""Keys of configurations: their values, explanations, lines and secrets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import ConfigDict, Field

from bottega.config import MASK, check_device_name, explanations, keys_of, lines_of, load, parse
from bottega.controlnet.config import ControlNetConfig
from bottega.errors import ConfigError
from bottega.strict import STRICT
from bottega.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A door."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    width_m: Annotated[float, Field(gt=0)] = 1.0
    """Width of the frame."""
    hub_token: Annotated[str, Field(max_length=12)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class House(Door):
    """A house, which is a door too, so as to inherit keys."""

    doors: int = 1
    """Number of doors.

    They are counted
    from outside.
    """
    windows: int = 2
    owner: str = "localhost:1"
    front: Door = field(default_factory=Door)
    rooms: dict[str, str] = field(default_factory=dict)


def file_of(folder: Path, text: str) -> Path:
    file = folder / "house.yaml"
    file.write_text(text)
    return file


def test_attribute_docstrings_explain_keys_and_are_inherited() -> None:
    assert explanations(House) == {
        "width_m": "Width of the frame.",
        "doors": "Number of doors. They are counted from outside.",
    }


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
    text = "owner: postgresql://me:hush@hush@h:5432/x\n"
    (owner,) = (key.shown() for key in keys_of(load(House, file_of(tmp_path, text))) if key.name == "owner")
    assert owner == f"postgresql://{MASK}@h:5432/x"
    text = "owner: postgresql://h/x?sslpassword=hush&password=hush&user=me\n"
    (owner,) = (key.shown() for key in keys_of(load(House, file_of(tmp_path, text))) if key.name == "owner")
    assert owner == f"postgresql://h/x?sslpassword={MASK}&password={MASK}&user=me"


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


def _bomb(reference: str) -> str:
    """Nine references to the line before in each line: 9^8 values if somebody follows them."""
    lines = ["a: &a {x: 1}"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} {reference.format(','.join([f'*{before}'] * 9))}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_bomb("[{}]"), "has an anchor or alias"),
        (_bomb("{{<<: [{}]}}"), "has an anchor or alias"),
        ("rooms: &a {hall: *a}", "has an anchor or alias"),
        ("<<: {doors: 3}\ndoors: 4", "merges sections"),
        ("rooms: " + "[" * 20_000, "nests more than 16 deep"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(600)), "nests more than 16 deep"),
        (f"doors: {'9' * 5000}", "a value of more than 4096 characters"),
        (f"doors: {'9' * 4000}", "a number beyond 64 bits: doors"),
        (f"front: {{width_m: 0x{'f' * 4000}}}", "a number beyond 64 bits: front.width_m"),
        ("owner: 2020-13-45", "is not YAML: month must be in 1..12"),
        (f"rooms: [{'1, ' * 50_000}]", "has more than 20000 keys and values"),
        ("x" * 300_000, "is longer than 256 KiB"),
        ("? [a]\n: 1", "has a key in line 1 that is no text"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_yaml_makes_much_of_little_with_is_refused_at_once_in_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    file = file_of(tmp_path, text)
    began_s = time.process_time()
    with pytest.raises(ConfigError) as error:
        load(House, file)
    assert said in error.value.message
    assert "\n" not in error.value.message
    assert error.value.exit_status == 2
    assert time.process_time() - began_s < 3.0, "20,000 events take .3 s"


def test_an_error_names_some_wrong_keys_and_shows_the_beginning_of_a_value(tmp_path: Path) -> None:
    many = "".join(f"key_{number}: 1\n" for number in range(5000))
    with pytest.raises(ConfigError) as error:
        load(House, file_of(tmp_path, f"doors: [{'1, ' * 1000}]\n{many}"))
    assert "and 4969 more" in error.value.message
    assert len(error.value.message) < 10_000


def test_a_key_that_is_there_twice_in_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice, in lines 2 and 3"):
        load(House, file_of(tmp_path, "rooms:\n- hall: a\n  hall: b\n"))


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_names_that_are_served(name: str) -> None:
    assert check_device_name(name) == name


@pytest.mark.parametrize("kind", [WorkerConfig, ControlNetConfig])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mps", r"Apple's GPUs \(mps\) are not served; use cpu, or cuda:N"),
        ("xpu:1", r"Intel's GPUs \(xpu\) are not served"),
        ("gpu", "no device is called 'gpu'; use auto, cpu, cuda or cuda:N"),
        ("cuda:", "no device is called 'cuda:'"),
    ],
)
def test_others_are_refused_with_a_sentence_by_worker_and_controlnet_server(kind: type, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.device: .*{why}"):
        parse(kind, {"engine": {"device": name}}, source=str(Path("worker.yaml")))
