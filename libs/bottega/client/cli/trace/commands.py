"""`bottega trace`: fetches what of a job took how long, and writes it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import click

from bottega.client.cli.escaping import escaped
from bottega.client.cli.gateway_options import address_option, connect
from bottega.client.cli.terminal import fail, note, say
from bottega.client.cli.trace.chrome import chrome_trace
from bottega.client.cli.trace.lanes import busy_s, lanes_of
from bottega.client.files import write_whole
from bottega.client.types.trace import JobTrace


@click.command("trace")
@click.argument("job_id", metavar="JOB")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, replacing it; default: trace-JOB.json.",
)
@click.option("--png", is_flag=True, help="Also draw the timeline, beside the file, as .png.")
@address_option
def command(*, job_id: str, output: Path | None, png: bool, address: str) -> None:
    """Show what of a job took how long, in all services: queue, steps, loads, waits, ControlNet calls.

    The file is for a trace viewer: open it at https://ui.perfetto.dev, or in chrome://tracing. Nothing is sent there by
    this command. A gateway keeps the traces of the jobs that ended last.
    """
    if png and output is not None and output.suffix.lower() == ".png":
        viewer = output.with_suffix(".json")
        raise click.UsageError(f"-o names the file for a trace viewer, the picture is written beside it: -o {viewer}")
    with connect(address) as client:
        trace = client.job(job_id).trace()
    target = output or Path(f"trace-{trace.job_id}.json")
    _write(target, chrome_trace(trace).encode())
    if png:
        from bottega.client.cli.trace.timeline import draw_timeline

        data = BytesIO()
        draw_timeline(trace).save(data, format="png")
        _write(target.with_suffix(".png"), data.getvalue())
    _say_tracks(trace)
    note(f"open {target} at https://ui.perfetto.dev")


def _write(target: Path, data: bytes) -> None:
    try:
        write_whole(target, data)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}", "Name another file with -o FILE.")
    say(str(target))


def _say_tracks(trace: JobTrace) -> None:
    """What was busy for how long, so that nobody needs a viewer to see where the time went."""
    tracks = dict.fromkeys((lane.service, lane.track) for lane in lanes_of(trace))
    for service, track in tracks:
        seconds = busy_s(span for span in trace.spans if (span.service, span.track) == (service, track))
        note(f"  {escaped(service)}, {escaped(track)}: {seconds * 1e3:,.1f} ms")
    if trace.dropped:
        note(f"{trace.dropped} spans were left out: a trace has a bound")
