"""`python -m bottega.client.cli`: the command, where its script is not on the path."""

from bottega.client.cli import main

main(prog_name="bottega")
