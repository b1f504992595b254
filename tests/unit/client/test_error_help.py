"""What the terminal says to do about an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bottega import errors
from bottega.client.cli.error_help import explain
from bottega.client.transport.calls import CallDeadline
from bottega.client.types.messages import check_size
from bottega.errors import BottegaError, DataLoss, InvalidRequest, NotFinite, StorageUnavailable, TooLarge, Violation
from bottega.storage import os_errors
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec
from bottega.v1.image_pb2 import SubmitJobRequest

LORA_STORE = {"service": "loras"}


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (os_errors.unavailable("not stored", cause="ENOSPC"), "Free space on the disk of the gateway"),
        (os_errors.unavailable("not stored", cause="EROFS"), "Let the gateway write"),
        (os_errors.unavailable("not stored", cause="EMFILE"), "The gateway resumes by itself when connections end"),
        (
            os_errors.unavailable("not stored", cause=os_errors.BUSY),
            "Try again in 5 s. If that does not help, see bottega logs",
        ),
        (errors.DeadlinePassed("too late"), "bottega generate starts another job; --timeout SECONDS gives it more"),
        (DataLoss("the job log is damaged"), "Another try does not help; bottega logs gateway"),
        (TooLarge("edges, depth take 9 bytes", metadata={"limit": "budget_bytes"}), "Ask for fewer ControlNets"),
        (TooLarge("the server hosts 256", metadata={"limit": "controlnets"}), "Host it on another ControlNet server"),
        (NotFinite("no numbers", metadata={"controlnets": "edges"}), "Try smaller scales (--control NAME=IMAGE"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_each_error_has_its_own_advice(error: BottegaError, todo: str) -> None:
    message, said = explain(error, "127.0.0.1:1")
    assert message == error.message
    assert said.startswith(todo)


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (
            StorageUnavailable("the disk is full", metadata={"cause": "ENOSPC", **LORA_STORE}),
            "Free space on the disk of the LoRA store; it then resumes by itself.",
        ),
        (DataLoss("a row is damaged", metadata=LORA_STORE), "bottega logs loras -n 50 says what is damaged."),
        (TooLarge("more than its disk_bytes", metadata=LORA_STORE), ""),
    ],
)
def test_what_a_lora_store_says_is_not_taken_for_the_gateways(error: BottegaError, todo: str) -> None:
    assert explain(error, "127.0.0.1:1") == (error.message, todo)


@pytest.mark.parametrize(
    ("field", "what"), [("spec.width", "this cannot be drawn"), ("page_token", "the request is invalid")]
)
def test_what_breaks_a_rule_is_named_as_people_call_it(field: str, what: str) -> None:
    error = InvalidRequest("broken", violations=[Violation(field=field, description="must be another one")])
    assert explain(error, "127.0.0.1:1") == (what, f"{field.removeprefix('spec.')}: must be another one")


@pytest.mark.parametrize(
    ("make", "large_by", "todo"),
    [
        (lambda data: GenerationSpec(prompt=data.decode()), "can be sent", "Send less at once."),
        (lambda data: GenerationSpec(image=data), "images: image 25 MiB", "Make the input images smaller"),
        (
            lambda data: GenerationSpec(controlnets=[ControlNet(name="edges", image=data)]),
            "images: control image of edges 25 MiB",
            "Make the input images smaller",
        ),
    ],
    ids=["prompt", "image", "control image"],
)
def test_what_helps_a_large_message_is_what_it_is_large_by(
    make: Callable[[bytes], GenerationSpec], large_by: str, todo: str
) -> None:
    with pytest.raises(TooLarge, match=f"{large_by}$") as refused:
        check_size(SubmitJobRequest(spec=make(bytes(25 << 20))))
    assert explain(refused.value, "127.0.0.1:1")[1].startswith(todo)


def test_a_command_that_cannot_be_given_more_time_does_not_advise_it() -> None:
    late = CallDeadline.after(30.0).passed()
    assert explain(late, "127.0.0.1:1") == (
        "not done within 30 s",
        "Try again when fewer jobs wait; bottega fleet shows the queue.",
    )
    assert explain(late, "127.0.0.1:1", timeout_advice="Allow more.")[1] == "Allow more."
