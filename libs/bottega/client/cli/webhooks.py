"""`bottega webhooks`: the webhooks that are not delivered yet, their replay, and secrets that sign them."""

from __future__ import annotations

import click

from bottega.client.cli.options import ListGroup, address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import PlainTable, note, print_table, say


@click.group("webhooks", cls=ListGroup)
@with_examples("""
    bottega webhooks                     lists what waits and what was given up
    bottega webhooks list --dead         lists what was given up
    bottega webhooks replay evt_...      delivers it now
    bottega webhooks replay --all-dead
""")
def command() -> None:
    """List and replay webhooks that are not delivered yet."""


@command.command("list")
@click.option("--dead", is_flag=True, help="Only those that were given up.")
@click.option("--tenant", help="Only those of one tenant.")
@click.option(
    "-n", "--number", type=click.IntRange(1, 100), default=20, show_default=True, help="Maximum of events on a page."
)
@click.option(
    "--page", "page_token", default="", metavar="TOKEN", help="Token printed at the end of the previous page."
)
@address_option
@fleet_option
def list_events(*, dead: bool, tenant: str | None, number: int, page_token: str, address: str) -> None:
    """List webhooks that wait or were given up, newest first."""
    with connect(address) as client:
        page = client.undelivered_webhooks(tenant=tenant, dead=dead, page_size=number, page_token=page_token)
    if not page.events:
        note("No webhook waits.")
        return
    table = PlainTable(
        "event",
        "type",
        "tenant",
        "url",
        "job ended",
        ">failed",
        "next",
        "why",
        wraps=("why", "url"),
        optional=("type",),
    )
    for event in page.events:
        after = "given up" if event.next_attempt_s is None else f"in {event.next_attempt_s:.0f} s"
        ended = event.created.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(
            event.event_id, event.type, event.tenant, event.url, ended, str(event.attempts), after, event.error
        )
    print_table(table)
    if page.next_page_token:
        note(f"There are more: --page {page.next_page_token}")


@command.command("replay")
@click.argument("event_ids", metavar="[EVENT]...", nargs=-1)
@click.option("--all-dead", is_flag=True, help="Those that were given up, oldest first, up to 1000 at once.")
@click.option("--tenant", help="With --all-dead only those of one tenant.")
@address_option
@fleet_option
def replay(*, event_ids: tuple[str, ...], all_dead: bool, tenant: str | None, address: str) -> None:
    """Deliver webhooks that were given up, or wait, now."""
    if bool(event_ids) == all_dead:
        raise click.UsageError("Name events, or give --all-dead.")
    with connect(address) as client:
        result = client.replay_webhooks(event_ids, all_dead=all_dead, tenant=tenant)
    say(f"{result.replayed} event{'' if result.replayed == 1 else 's'} will be delivered now")
    if result.damaged:
        note(f"dropped, because damaged in the job store: {result.damaged}")
    if result.left:
        note(f"still given up: {result.left}; repeat the command")


@command.command("secret")
def secret() -> None:
    """Print a new secret, for a gateway without tenants.

    Its configuration names the file that has it: webhooks.secrets.
    """
    from bottega.rpc.security.tenant_file import new_webhook_secret

    say(new_webhook_secret())
