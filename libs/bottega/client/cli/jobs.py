"""`bottega jobs`: lists, follows, fetches, cancels, deletes and migrates jobs."""

from __future__ import annotations

import asyncio
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from bottega.client.cli.drawing import choose_output, note_approximate, note_unknown_to_embedded_model, save_all
from bottega.client.cli.options import ListGroup, address_option, connect, timeout_option, with_examples
from bottega.client.cli.terminal import PlainTable, escaped_and_cut, fail, note, print_table, say
from bottega.client.types.jobs import JobState, JobStatus
from bottega.errors import StorageUnavailable
from bottega.manifest import load_object, read_services

# Jobs that a message names.
_MAX_NAMED = 8


@click.group("jobs", cls=ListGroup)
@with_examples("""
    bottega generate "a big red star" --detach   prints the job's ID
    bottega jobs                                 lists the newest jobs
    bottega jobs watch ID                        follows one
    bottega jobs get ID -o star.png              fetches its pictures
    bottega jobs delete ID                       deletes it with its pictures
    bottega jobs migrate --from sqlite:jobs.sqlite --to postgresql://db/bottega
""")
def command() -> None:
    """List, follow, fetch, cancel, delete and migrate jobs."""


@command.command("migrate")
@click.option("--from", "source", required=True, metavar="STORE", help="The store to copy, which stays as it is.")
@click.option("--to", "target", required=True, metavar="STORE", help="The store to copy to.")
@click.option(
    "--objects",
    default="",
    metavar="s3://...",
    help="`objects` of the gateways that use PostgreSQL; images are copied, too. By default they stay in their folder.",
)
def migrate(*, source: str, target: str, objects: str) -> None:
    """Copy all jobs between SQLite and PostgreSQL.

    sqlite:PATH is jobs.sqlite in a gateway's `state`, the other is postgresql://USER@HOST/NAME. Stop the gateways
    before. The command can be repeated, and compares both sides at the end. PostgreSQL's password
    comes from PGPASSWORD or PGPASSFILE.
    """
    read_services()  # says what to install if the gateway is not
    try:
        counts = asyncio.run(load_object("bottega.gateway.jobs.migration:migrate")(source, target, objects=objects))
    except StorageUnavailable as error:  # its cause is hidden from callers of a gateway, not from its operator
        why = str(error.__cause__ or "").partition("\n")[0]
        fail(f"{error.message}{': ' if why else ''}{why}", "The source is as it was; repeat the command.")
    say(f"jobs: {counts.jobs} in the source, {counts.same_jobs} the same in the target")
    say(f"webhook events: {counts.events} in the source, {counts.same_events} in the target")
    say(f"deletions: {counts.deletions} in the source, {counts.same_deletions} in the target")
    if counts.copies_images:
        say(f"images: {counts.images} in the source, {counts.same_images} in the target")
    else:
        note("Images stay in their folder; --objects s3://... copies them.")
    if counts.evicted_images:
        note(f"{counts.evicted_images} images had been evicted from the source before.")
    if counts.different:
        more = len(counts.different) - _MAX_NAMED
        names = ", ".join(counts.different[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        fail(f"the target has other values for {names}", "It has been used since the first copy; it was not changed.")
    if not counts.equal:
        fail("the target lacks some of it", "Repeat the command.")


@command.command("watch")
@click.argument("job_id", metavar="ID")
@timeout_option
@address_option
def watch(*, job_id: str, timeout_s: float, address: str) -> None:
    """Follow a job to its end. Ctrl-C does not cancel it."""
    from bottega.client.cli.progress_bar import show_progress

    with connect(address, timeout_s=timeout_s) as client:
        try:
            completed = show_progress(client.job(job_id).stream())
        except KeyboardInterrupt:
            fail("interrupted; the job goes on", f"bottega jobs cancel {job_id} ends it.")
    count = len(completed.images)
    say(f"{job_id} completed: {count} picture{'' if count == 1 else 's'}")
    note(f"Get its pictures: bottega jobs get {job_id}")


@command.command("cancel")
@click.argument("job_id", metavar="ID")
@address_option
def cancel(*, job_id: str, address: str) -> None:
    """Cancel a job that has not ended."""
    with connect(address) as client:
        state = client.job(job_id).cancel().state
    if state is not JobState.CANCELLED:
        fail(f"{job_id} had ended already: {state}")
    say(f"{job_id} cancelled")


@command.command("delete")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@address_option
def delete(*, job_ids: tuple[str, ...], address: str) -> None:
    """Delete jobs that have ended, with their pictures."""
    with connect(address) as client:
        for job_id in job_ids:
            client.delete(job_id)
            say(f"{job_id} deleted")


@command.command("get")
@click.argument("job_id", metavar="ID")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture file to write or replace; default: a new name from prompt and seed.",
)
@click.option("--wait", is_flag=True, help="Wait for the job if it has not ended.")
@timeout_option
@address_option
def get(*, job_id: str, output: Path | None, wait: bool, timeout_s: float, address: str) -> None:
    """Fetch the pictures of a job.

    Several pictures are written to FILE-0, FILE-1 and so on.
    """
    from bottega.client.cli.progress_bar import show_progress

    with connect(address, timeout_s=timeout_s) as client:
        job = client.job(job_id)
        status = job.status()
        drawn = status.parameters
        target = choose_output(output, drawn.format or "png", drawn.prompts or [drawn.prompt])
        if not status.state.ended and not wait:
            _refuse(status)
        try:
            completed = show_progress(job.stream())
        except KeyboardInterrupt:
            fail("interrupted; the job goes on", f"bottega jobs get {job_id} --wait fetches its pictures later.")
    save_all(completed.images, target)
    note_approximate(completed.provenance)
    note_unknown_to_embedded_model(completed.provenance.parameters)


def _refuse(status: JobStatus) -> None:
    steps = f", {status.steps_done} of {status.steps_total} steps done" if status.steps_done else ""
    fail(
        f"job {status.job_id} is {status.state}{steps}; it has no picture yet",
        f"bottega jobs get {status.job_id} --wait waits for it.",
    )


_STATES = ("queued", "running", "completed", "failed", "cancelled")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_AGO = re.compile(r"(\d{1,6})([smhd])")
# Columns of a prompt: enough to recognize it.
_PROMPT_COLUMNS = 120
# Empty pages that are skipped: a page without jobs need not be the last one.
_MOST_PAGES = 100


class _Moment(click.ParamType[datetime]):
    """A Click type for a time: a local date, a local date with a time, or an age such as 2h."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            if ago := _AGO.fullmatch(value):
                return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time; give 2h (s, m, h, d ago), 2026-11-21 or 2026-11-21T10:30", param, ctx)


@command.command("list")
@click.option(
    "--state", "states", type=click.Choice(_STATES), multiple=True, help="Only jobs in this state; repeatable."
)
@click.option(
    "--since", type=_Moment(), help="Only jobs newer than 2h (units s, m, h, d), 2026-11-21 or 2026-11-21T10:30."
)
@click.option("--until", type=_Moment(), help="Only jobs older than this time, in the formats of --since.")
@click.option(
    "-n", "--number", type=click.IntRange(1, 100), default=20, show_default=True, help="Maximum of jobs on a page."
)
@click.option(
    "--page",
    "page_token",
    default="",
    metavar="TOKEN",
    help="Show the next page of a list; the last line of the list prints the token.",
)
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
    """Return a table with one row for each job."""
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
        escaped_and_cut(" | ".join(job.parameters.prompts or [job.parameters.prompt]), _PROMPT_COLUMNS),
    )


def _duration_text(job: JobStatus) -> str:
    """Return the time from a job's first attempt to its end, or to now if it has not ended."""
    if job.started is None:
        return ""
    return f"{((job.ended or datetime.now(UTC)) - job.started).total_seconds():.1f} s"


def _next_page_command(states: tuple[str, ...], since: datetime | None, until: datetime | None, number: int) -> str:
    """Return the command that shows the next page of the list.

    Its times are absolute, because an age such as 2h would mean another time when the command is run.
    """
    words = ["bottega", "jobs", *(f"--state={state}" for state in states), "-n", str(number)]
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            words.append(f"--{name}={moment.isoformat(timespec='milliseconds')}")
    return shlex.join(words)
