"""`python -m bottega.client.cli`: runs the `bottega` command where its script is not on the PATH."""

from bottega.client.cli import main

main(prog_name="bottega")
