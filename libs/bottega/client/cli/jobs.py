"""`bottega jobs`: what has been asked for, and what became of it. Lists are in job_list.py."""

from __future__ import annotations

from pathlib import Path

import click

from bottega.client.cli.drawing import note_approximate, note_unknown_to_embedded_model
from bottega.client.cli.gateway_options import address_option, connect, timeout_option
from bottega.client.cli.job_list import list_command
from bottega.client.cli.list_group import ListGroup
from bottega.client.cli.output_files import choose_output, save_all
from bottega.client.cli.terminal import fail, note, say
from bottega.client.types.jobs import JobState, JobStatus


@click.group("jobs", cls=ListGroup)
def command() -> None:
    """Look after jobs: list, watch, cancel, get, delete.

    \b
      bottega generate "a big red star" --detach -o star.png     says the job's ID
      bottega jobs                                                the newest ones
      bottega jobs watch ID
      bottega jobs get ID -o star.png
      bottega jobs delete ID                                      with its pictures
    """


command.add_command(list_command)


@command.command("watch")
@click.argument("job_id", metavar="ID")
@timeout_option
@address_option
def watch(*, job_id: str, timeout_s: float, address: str) -> None:
    """Follow a job to its end. Ctrl-C stops only the watching."""
    from bottega.client.cli.progress_bar import show_progress

    with connect(address, timeout_s=timeout_s) as client:
        try:
            completed = show_progress(client.job(job_id).stream())
        except KeyboardInterrupt:
            fail("no longer watched; the job goes on", f"bottega jobs cancel {job_id} would end it.")
    count = len(completed.images)
    say(f"{job_id} completed: {count} picture{'' if count == 1 else 's'}")
    note(f"bottega jobs get {job_id}")


@command.command("cancel")
@click.argument("job_id", metavar="ID")
@address_option
def cancel(*, job_id: str, address: str) -> None:
    """End a job. One that has ended stays as it is."""
    with connect(address) as client:
        state = client.job(job_id).cancel().state
    if state is not JobState.CANCELLED:
        fail(f"{job_id} had ended already: {state}")
    say(f"{job_id} cancelled")


@command.command("delete")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@address_option
def delete(*, job_ids: tuple[str, ...], address: str) -> None:
    """Delete jobs that have ended, with their pictures and all that is kept of them."""
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
    help="Picture to write, replacing it; default: a new name from prompt and seed.",
)
@click.option("--wait", is_flag=True, help="Follow the job first if it has not ended.")
@timeout_option
@address_option
def get(*, job_id: str, output: Path | None, wait: bool, timeout_s: float, address: str) -> None:
    """Fetch the pictures of a job: FILE, or FILE-0, FILE-1 and so on where there are several."""
    from bottega.client.cli.progress_bar import show_progress

    with connect(address, timeout_s=timeout_s) as client:
        job = client.job(job_id)
        status = job.status()
        target = choose_output(output, status.parameters.format or "png", status.parameters.prompt)
        if not status.state.ended and not wait:
            _refuse(status)
        try:
            completed = show_progress(job.stream())
        except KeyboardInterrupt:
            fail("stopped; the job goes on", f"bottega jobs get {job_id} --wait")
    save_all(completed.images, target)
    note_approximate(completed.provenance)
    note_unknown_to_embedded_model(completed.provenance.parameters)


def _refuse(status: JobStatus) -> None:
    steps = f", {status.steps_done} of {status.steps_total} steps done" if status.steps_done else ""
    fail(
        f"job {status.job_id} is {status.state}{steps}: there is no picture yet",
        f"bottega jobs get {status.job_id} --wait fetches it as soon as it is there.",
    )
