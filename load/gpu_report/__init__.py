"""What the suite gains on a GPU: `make gpu-report`, a table, a line of JSON and a picture of the figures.

`parts` lists what is measured. Each part is a process of its own (`runner`), and its outcome stays in a folder, so that
a run that was cut off goes on where it was. `--small` runs all of them on a CPU, to see that they work.
"""
