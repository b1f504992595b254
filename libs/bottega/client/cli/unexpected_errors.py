"""What nobody expected: tracebacks of the command itself, and what libraries log, as plain text."""

from __future__ import annotations

import logging
import traceback
from typing import NoReturn

from bottega.client.cli.escaping import escaped_lines
from bottega.client.cli.terminal import fail, note


def report_unexpected_error(error: Exception) -> NoReturn:
    """Ends the command with the traceback of an error that it should have known."""
    for line in escaped_lines("".join(traceback.format_exception(error)).rstrip()):
        note(f"  | {line}")
    fail(
        f"a fault of this command itself: {type(error).__name__}",
        "What is above says where it is; please report it with the command line.",
    )


def show_logged_warnings() -> None:
    """Shows warnings and errors that are logged in this process."""
    logging.basicConfig(handlers=[_Notes()])


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # The suite's own warnings are sentences for people; those of libraries show where they come from.
        is_ours = record.name.startswith("bottega.") and not record.exc_info
        for line in escaped_lines(record.getMessage() if is_ours else self.format(record)):
            note(line)
