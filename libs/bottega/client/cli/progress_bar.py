"""Shows the progress of a job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager

from rich.progress import BarColumn, SpinnerColumn, TaskID, TimeElapsedColumn
from rich.progress import Progress as Bar

from bottega.client.cli.terminal import new_console, note, text_column
from bottega.client.types.jobs import Completed, Event, Interrupted, Progress, Queued
from bottega.errors import InternalError, Unavailable

_Show = Callable[[Event], None]

# Lines of progress where there is no terminal, such as in a log.
_LINES = 4


def show_progress(
    stream: Generator[Event, None, None], on_progress: Callable[[Progress], None] | None = None
) -> Completed:
    """Show a job's events until it has completed.

    Args:
        on_progress: Called with every Progress event.
    """
    with closing(stream), _showing() as show:
        for event in stream:
            show(event)
            if isinstance(event, Completed):
                return event
            if on_progress and isinstance(event, Progress):
                on_progress(event)
    raise InternalError("the stream of events ended before the job completed")


@contextmanager
def _showing() -> Iterator[_Show]:
    """Yield a function that shows one event."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        yield _Lines().show
        return
    columns = (SpinnerColumn(), text_column("happens"), BarColumn(bar_width=32), text_column("steps"))
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None, happens="asking the gateway", steps="")
        yield lambda event: _move(bar, task, event)


def describe_wait(event: Queued | Interrupted) -> str:
    """Return one line that says why drawing has not begun or does not go on."""
    if isinstance(event, Interrupted):
        return f"{'the gateway does not answer' if _is_unanswered(event) else event.error.message}; trying again"
    before = f"{event.place} before it" if event.place else "next"
    known = event.estimate_s is not None and math.isfinite(event.estimate_s)
    estimate = "" if event.estimate_s is None or not known else f", about {max(1, round(event.estimate_s))} s"
    return f"queued, {before}{estimate}"


def _is_unanswered(event: Event) -> bool:
    return isinstance(event, Interrupted) and type(event.error) is Unavailable


class _Lines:
    """A progress display that prints a line when the place in the queue changes, and at some of the steps."""

    def __init__(self) -> None:
        self._last = ""
        self._quarter = 0

    def show(self, event: Event) -> None:
        if _is_unanswered(event):
            return  # the SDK logs it, with the address and what to do
        if isinstance(event, Queued | Interrupted):
            self._note(describe_wait(event))
        elif isinstance(event, Progress) and event.steps_total:
            quarter = event.steps_done * _LINES // event.steps_total
            if quarter > self._quarter:
                self._quarter = quarter
                self._note(f"step {event.steps_done} of {event.steps_total}")

    def _note(self, line: str) -> None:
        if line != self._last:
            note(line)
        self._last = line


def _move(bar: Bar, task: TaskID, event: Event) -> None:
    if isinstance(event, Queued | Interrupted):
        bar.update(task, happens=describe_wait(event))
    elif isinstance(event, Progress):
        steps = f"{event.steps_done}/{event.steps_total}"
        bar.update(task, happens="drawing", total=event.steps_total, completed=event.steps_done, steps=steps)
