"""What the terminal says to do about an error."""

from __future__ import annotations

import pytest

from bottega.client.cli.error_help import explain
from bottega.client.transport.retry import CallDeadline
from bottega.client.types.message_size import check_size
from bottega.errors import (
    BottegaError,
    DataLoss,
    LinksFull,
    MethodNotServed,
    NoLora,
    NotFinite,
    ReaderStalled,
    StorageUnavailable,
    TooLarge,
)
from bottega.storage import os_errors
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import SubmitJobRequest


@pytest.mark.parametrize(
    ("cause", "todo"),
    [
        ("ENOSPC", "Make room"),
        ("SQLITE_FULL", "Make room"),
        ("SQLITE_IOERR_WRITE", "Make room"),
        ("SQLITE_READONLY_DBMOVED", "Let the gateway write"),
        ("EROFS", "Let the gateway write"),
        ("EMFILE", "The gateway goes on by itself when connections end"),
        (os_errors.BUSY, "Try again in 5 s; if it stays so, bottega logs"),
    ],
)
def test_room_is_to_be_made_only_where_room_is_the_matter(cause: str, todo: str) -> None:
    message, said = explain(os_errors.unavailable("it cannot be stored", cause=cause), "127.0.0.1:1")
    assert message == "it cannot be stored"
    assert said.startswith(todo)


def test_a_gateway_that_starts_is_asked_again() -> None:
    starting = StorageUnavailable("the gateway is still starting", retry_after_s=1.0)
    assert explain(starting, "127.0.0.1:1")[1].startswith("Try again in 1 s")


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (StorageUnavailable("the disk is full", metadata={"cause": "ENOSPC"}), "Make room on the LoRA store's disk"),
        (DataLoss("a row is damaged"), "bottega logs loras"),
        (TooLarge("more than its disk_bytes"), ""),
        (NoLora("no LoRA store has joined"), "bottega fleet shows whether a LoRA store has joined"),
    ],
)
def test_what_a_lora_store_says_is_not_taken_for_the_gateways(error: BottegaError, todo: str) -> None:
    error.metadata["service"] = "loras"
    message, said = explain(error, "127.0.0.1:1")
    assert message == error.message
    assert said.startswith(todo)
    assert "gateway" not in said


@pytest.mark.parametrize(
    "error",
    [
        LinksFull("as many links", metadata={"limit": "links"}, retry_after_s=1.0),
        TooLarge("edges, depth take 9 bytes together", metadata={"limit": "budget_bytes"}),
        TooLarge("the server hosts 256", metadata={"limit": "controlnets"}),
    ],
    ids=["links", "budget", "hosted"],
)
def test_nobody_is_told_to_ask_for_a_smaller_picture_where_no_picture_is_too_large(error: BottegaError) -> None:
    message, said = explain(error, "127.0.0.1:1")
    assert message == error.message
    assert said
    assert "picture" not in said


def test_a_picture_that_is_too_large_is_made_smaller() -> None:
    error = TooLarge("4096x4096 are 16777216 pixels", metadata={"limit": "max_pixels"})
    assert explain(error, "127.0.0.1:1")[1].startswith("Ask for a smaller picture")


def test_a_lora_that_is_damaged_is_brought_again() -> None:
    said = explain(DataLoss("LoRA ink: its file is damaged", metadata={"loras": "ink"}), "127.0.0.1:1")
    assert said[0] == "LoRA ink: its file is damaged"
    assert "bottega loras add ink FILE" in said[1]


@pytest.mark.parametrize(
    ("letters", "todo"), [(25 << 20, "Ask for less at once."), (0, "Make the input images smaller")]
)
def test_what_helps_a_large_message_is_what_it_is_large_by(letters: int, todo: str) -> None:
    spec = GenerationSpec(prompt="x" * letters)
    if not letters:
        spec.image = bytes(25 << 20)
    with pytest.raises(TooLarge) as refused:
        check_size(SubmitJobRequest(spec=spec))
    assert explain(refused.value, "127.0.0.1:1")[1].startswith(todo)


def test_a_command_that_cannot_be_given_more_time_does_not_advise_it() -> None:
    late = CallDeadline.after(30.0).passed()
    assert explain(late, "127.0.0.1:1") == (
        "not done within 30 s",
        "Try again when less is waiting: bottega fleet shows what is.",
    )
    assert explain(late, "127.0.0.1:1", timeout_advice="Allow more.")[1] == "Allow more."


def test_values_that_are_no_numbers_are_put_down_to_loras_where_there_are_some() -> None:
    plain, styled = NotFinite("no numbers"), NotFinite("no numbers", metadata={"loras": "ink"})
    assert explain(plain, "127.0.0.1:1")[1].startswith("Try another seed")
    assert explain(styled, "127.0.0.1:1")[1].startswith("Try scales nearer to 0 (--lora NAME:SCALE)")


@pytest.mark.parametrize("error", [ReaderStalled("your answers were not read"), MethodNotServed("nobody has it")])
def test_a_gateway_that_answered_is_not_said_to_be_silent(error: BottegaError) -> None:
    message, said = explain(error, "127.0.0.1:1")
    assert message == error.message
    assert "bottega up" not in said
