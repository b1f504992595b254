"""The `bottega` command: its subcommands by name, and the handling of errors. Each subcommand has a module."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from bottega.client.addons import add_ons_by_command
from bottega.client.cli.options import gateway_choice, with_examples
from bottega.client.cli.terminal import escaped_lines, fail, note
from bottega.errors import BottegaError

# In the order in which a newcomer needs them: the module of each, and what --help says of it, because importing all
# their modules takes longer than everything else that --help does. The Click command is the module's `command`, or what
# follows the colon. Those of add-ons are in their own packages.
_COMMANDS: dict[str, tuple[str, str] | None] = {
    "up": ("up", "Run the whole suite on this machine."),
    "stop": ("logs:stop", "Stop the suite that runs here."),
    "generate": ("generate", "Draw a picture of PROMPT."),
    "edit": ("generate:edit", "Redraw a part of IMAGE so that the whole picture shows PROMPT."),
    "verify": ("verify", "Check who signed a picture, draw it again, and compare."),
    "jobs": ("jobs", "List, follow, fetch, cancel, delete and migrate jobs."),
    "models": ("models", "List, check and import models."),
    **dict.fromkeys(add_ons_by_command()),
    "fleet": ("fleet", "Show the services and their load, live."),
    "top": ("fleet:top", "Show what the services do now, live."),
    "scale": ("scale", "Show how many workers and ControlNet servers each model needs."),
    "trace": ("trace", "Show where the time of a job was spent, in all services."),
    "logs": ("logs", "Show the last log lines of SERVICE, or of all services."),
    "config": ("config", "Check configurations, and show the values that services use."),
    "tenants": ("tenants", "Manage the tenants of a gateway and their API keys."),
    "webhooks": ("webhooks", "List and replay webhooks that are not delivered yet."),
    "certs": ("certs", "Make certificates for services, tenants and operators."),
    "doctor": ("doctor", "Look for problems that keep the suite from running."),
}


class _Commands(click.Group):
    """A group of subcommands whose modules are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        own = _COMMANDS[cmd_name]
        path = f"{__name__}.{own[0]}" if own else f"{add_ons_by_command()[cmd_name]}.cli"
        module, _, attribute = path.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(name)) for name in _COMMANDS])

    def _short_help(self, name: str) -> str:
        own = _COMMANDS[name]
        text: str = own[1] if own else importlib.import_module(add_ons_by_command()[name]).HELP
        return text

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _plain_usage():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        from bottega.client.cli.error_help import exit_status, explain

        show_logged_warnings()
        try:
            with _plain_usage():
                return super().invoke(ctx)
        except BottegaError as error:
            choice = gateway_choice(ctx)
            what, todo = explain(error, choice.address, timeout_advice=choice.timeout_advice)
            fail(what, todo, status=exit_status(error))
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise  # click handles these
        except Exception as error:  # noqa: BLE001 - Python would print its text unescaped
            report_unexpected_error(error)


@contextmanager
def _plain_usage() -> Iterator[None]:
    """Escape the messages of Click about a wrong command line, because file names may contain control characters."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise click.UsageError("\n".join(escaped_lines(error.format_message())), ctx=error.ctx) from error


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(
    importlib.metadata.version("bottega-libs"), "-V", "--version", prog_name="bottega", message="%(prog)s %(version)s"
)
@with_examples("""
    bottega up
    bottega generate "a big red star on a blue background" -o star.png
""")
def main() -> None:
    """Draw pictures from text prompts, with services that run on your own machines.

    To begin, run these two commands in two terminals:
    """


def report_unexpected_error(error: Exception) -> NoReturn:
    """Print the traceback of an unexpected error, and end the command."""
    for line in escaped_lines("".join(traceback.format_exception(error)).rstrip()):
        note(f"  | {line}")
    fail(
        f"unexpected error in this command: {type(error).__name__}",
        "Please report the lines above, together with the command line.",
    )


def show_logged_warnings() -> None:
    """Print the warnings and errors that are logged in this process."""
    logging.basicConfig(handlers=[_Notes()])


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Bottega's own warnings are sentences for people. Those of libraries are shown with their origin.
        is_ours = record.name.startswith("bottega.") and not record.exc_info
        for line in escaped_lines(record.getMessage() if is_ours else self.format(record)):
            note(line)
