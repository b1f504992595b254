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

# In the order in which a newcomer needs them. The module of each has a Click command `command`.
_COMMANDS = (
    "up",
    "stop",
    "generate",
    "edit",
    "verify",
    "jobs",
    "models",
    *add_ons_by_command(),
    "fleet",
    "top",
    "trace",
    "logs",
    "config",
    "tenants",
    "certs",
    "doctor",
)

# What --help says of them. Importing all their modules takes longer than everything else that --help does.
_SHORT_HELP = {
    "up": "Run the whole suite on this machine.",
    "stop": "Stop the suite that runs here.",
    "generate": "Draw a picture of PROMPT.",
    "edit": "Redraw a part of IMAGE so that the whole picture shows PROMPT.",
    "verify": "Check who signed a picture, draw it again, and compare.",
    "jobs": "List, follow, fetch, cancel and delete jobs.",
    "models": "List, check and import models.",
    "fleet": "Show the services and their load, live.",
    "top": "Show what the services do now, live.",
    "trace": "Show where the time of a job was spent, in all services.",
    "logs": "Show the last log lines of SERVICE, or of all services.",
    "config": "Check configurations, and show the values that services use.",
    "tenants": "Manage the tenants of a gateway and their API keys.",
    "certs": "Make certificates for services, tenants and operators.",
    "doctor": "Look for problems that keep the suite from running.",
}


class _Commands(click.Group):
    """A group of subcommands whose modules are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        add_on = add_ons_by_command().get(cmd_name)
        module = f"{add_on}.cli" if add_on else f"{__name__}.{cmd_name}"
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(name)) for name in _COMMANDS])

    def _short_help(self, name: str) -> str:
        add_on = add_ons_by_command().get(name)
        text: str = _SHORT_HELP[name] if add_on is None else importlib.import_module(add_on).HELP
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
