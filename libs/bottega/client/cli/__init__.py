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

from bottega.client.addons import add_on_names
from bottega.client.cli.escaping import escaped_lines
from bottega.client.cli.options import gateway_choice
from bottega.client.cli.terminal import fail, note
from bottega.errors import BottegaError

# In the order in which a newcomer needs them; each module or package has the click command as `command`.
_COMMANDS = (
    "up",
    "stop",
    "generate",
    "edit",
    "jobs",
    "models",
    *add_on_names(),
    "fleet",
    "top",
    "trace",
    "logs",
    "config",
    "tenants",
    "certs",
    "doctor",
)


class _Commands(click.Group):
    """Subcommands whose modules are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = f"bottega.client.addons.{cmd_name}.cli" if cmd_name in add_on_names() else f"{__name__}.{cmd_name}"
        command: click.Command = importlib.import_module(module).command
        return command

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
            raise  # click knows what to do
        except Exception as error:  # noqa: BLE001 - Python would print its text as it is
            report_unexpected_error(error)


@contextmanager
def _plain_usage() -> Iterator[None]:
    """What click says of a wrong command line, without what could steer a terminal: files may be called anything."""
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
def main() -> None:
    """Bottega draws pictures from words, with services that run on your own machines.

    \b
    Two commands to begin with, in two terminals:
      bottega up
      bottega generate "a big red star on the left on a blue background" -o star.png
    """


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
