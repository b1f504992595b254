"""`bottega cache`: what the approximate cache holds, how well it serves, and how to fill and to empty it."""

from __future__ import annotations

import click

from bottega.client.cli.cache.inspect import command as inspect_command
from bottega.client.cli.cache.profile import command as profile_command
from bottega.client.cli.cache.profiles import command as profiles_command
from bottega.client.cli.cache.stats import command as stats_command
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.list_group import ListGroup
from bottega.client.cli.terminal import confirm, fail, note, say
from bottega.client.sdk.clients import Client

_WARM = "warm"


class _CacheGroup(ListGroup):
    needs_no_word = "stats"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), _WARM])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != _WARM:
            return super().get_command(ctx, cmd_name)
        # Its options are those of all add-ons, this one too.
        from bottega.client.cli.cache.warm import command as warm_command

        return warm_command


@click.group("cache", cls=_CacheGroup)
def command() -> None:
    """Look after the approximate cache: stats, inspect, warm, clear, profile, profiles.

    \b
      bottega cache                    what it holds, and how well it serves
      bottega cache inspect ENTRY      one entry; writes its picture
      bottega cache warm prompts.txt   draws a prompt a line, so that later ones may start from theirs
      bottega cache profile            measures which similarity is enough to skip how many steps
      bottega cache profiles           what was measured
      bottega cache clear              forgets the entries
      bottega generate "a red star" --cache
    """


@command.command("clear")
@click.option("--model", help="Only the entries of this model, as bottega models or bottega cache lists it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_option
@fleet_option
def clear(*, model: str | None, yes: bool, address: str) -> None:
    """Forget the entries: all, or those of one model. Profiles stay."""
    with connect(address) as client:
        model_hash = _hash_of(client, model) if model else ""
        if not yes:
            whose = f"all entries of {model}" if model else "all entries of the cache"
            note(f"{whose} will be deleted for good")
            confirm("Delete?")
        number = client.clear_cache(model_hash)
    say(f"{number} {'entry' if number == 1 else 'entries'} deleted")


def _hash_of(client: Client, model: str) -> str:
    """A model that is not served now is meant by its hash, or by the beginning of it, as tables show it."""
    for served in client.models():
        if served.name == model:
            return served.model_hash
    known = {each.model_hash for cache in client.cache_stats() for each in cache.stats.models}
    found = sorted(each for each in known if each.startswith(model))
    if len(found) != 1:
        fail(
            f"{len(found)} models that the cache has entries of have a hash that begins with {model!r}"
            if found
            else f"the cache has no entries of a model {model!r}",
            "bottega cache lists the models that it has entries of.",
            status=2,
        )
    return found[0]


for each in (stats_command, inspect_command, profile_command, profiles_command):
    command.add_command(each)
