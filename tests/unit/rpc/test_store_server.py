"""Answers of a store to one worker."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.errors import BottegaError
from bottega.rpc import store_server
from bottega.rpc.store_server import StoreLinkHandler
from bottega.transport import Connection, Incoming


class Handler(StoreLinkHandler):
    """Answers what it is told to."""

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        raise NotImplementedError

    def on_end(self, cause: BottegaError) -> None:
        raise NotImplementedError


class Outbox:
    """Takes what is to be sent, and sends nothing."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, task: Any) -> bool:
        self.posted.append(task)
        return True


def test_answers_that_could_not_be_made_do_not_count_as_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_MOST_UNSENT", 2)
    handler: Any = Handler(Outbox())  # type: ignore[arg-type]

    def fault() -> Any:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            handler._send_answer(fault, refusal=None)
    made: list[str] = []
    handler._send_answer(lambda: made.append("an answer"), refusal=None)
    assert made == ["an answer"]
