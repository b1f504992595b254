"""`python -m bottega.client.cli`: runs the `bottega` command when its script is not on the path."""

from bottega.client.cli import main

main(prog_name="bottega")
