"""`bottega jobs list`: jobs as a table, newest first, in pages. Knows what a person wants to see of each."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta

import click

from bottega.client.cli.escaping import escaped_and_cut
from bottega.client.cli.gateway_options import address_option, connect
from bottega.client.cli.terminal import PlainTable, note, print_table
from bottega.client.types.jobs import JobState, JobStatus

_STATES = ("queued", "running", "completed", "failed", "cancelled")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_AGO = re.compile(r"(\d{1,6})([smhd])")
# Of a prompt: enough to know it again.
_PROMPT_COLUMNS = 120
# A page may have no jobs and not be the last one: so many are turned for a person who waits.
_MOST_PAGES = 100


class _Moment(click.ParamType[datetime]):
    """A local date, a local time of a date, or how long ago."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            if ago := _AGO.fullmatch(value):
                return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time: 2h (s, m, h, d ago), 2026-11-21 or 2026-11-21T10:30", param, ctx)


@click.command("list")
@click.option("--state", "states", type=click.Choice(_STATES), multiple=True, help="Only these; may be repeated.")
@click.option("--since", type=_Moment(), help="Accepted since: 2h (s, m, h, d ago), 2026-11-21 or 2026-11-21T10:30.")
@click.option("--until", type=_Moment(), help="Accepted before, said in the same ways.")
@click.option("-n", "--number", type=click.IntRange(1, 100), default=20, show_default=True, help="Jobs a page.")
@click.option("--page", "page_token", default="", metavar="TOKEN", help="As the page before says.")
@address_option
def list_command(
    *,
    states: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    number: int,
    page_token: str,
    address: str,
) -> None:
    """List jobs, newest first."""
    with connect(address) as client:
        for _ in range(_MOST_PAGES):
            page = client.list_jobs(
                states=[JobState(state) for state in states],
                created_after=since,
                created_before=until,
                page_size=number,
                page_token=page_token,
            )
            if page.jobs or not page.next_page_token:
                break
            page_token = page.next_page_token
    if page.jobs:
        print_table(jobs_table(page.jobs))
    elif not page.next_page_token:
        note("There are no such jobs." if states or since or until or page_token else "There are no jobs yet.")
    if page.next_page_token:
        note(f"More: {_next_page_command(states, since, until, number)} --page {shlex.quote(page.next_page_token)}")


def jobs_table(jobs: tuple[JobStatus, ...]) -> PlainTable:
    """Return one row for each job."""
    table = PlainTable("job", "state", ">steps", "accepted", ">took", "prompt", optional=("accepted", "took", "steps"))
    for job in jobs:
        table.add_row(*_row(job))
    return table


def _row(job: JobStatus) -> tuple[str, ...]:
    return (
        job.job_id,
        str(job.state),
        f"{job.steps_done}/{job.steps_total}" if job.steps_total else "",
        f"{job.created.astimezone():%Y-%m-%d %H:%M:%S}",
        _duration_text(job),
        escaped_and_cut(job.parameters.prompt, _PROMPT_COLUMNS),
    )


def _duration_text(job: JobStatus) -> str:
    """From when a worker took it first to its end, or to now."""
    if job.started is None:
        return ""
    return f"{((job.ended or datetime.now(UTC)) - job.started).total_seconds():.1f} s"


def _next_page_command(states: tuple[str, ...], since: datetime | None, until: datetime | None, number: int) -> str:
    """The command that lists the same jobs. Moments as they were meant: a later "2h ago" would be another one."""
    words = ["bottega", "jobs", *(f"--state={state}" for state in states), "-n", str(number)]
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            words.append(f"--{name}={moment.isoformat(timespec='milliseconds')}")
    return shlex.join(words)
