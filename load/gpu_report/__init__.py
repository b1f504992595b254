"""What a GPU does with all of this: `make gpu-report`, a table, a line of JSON and a picture of the figures.

`parts` lists what is measured; each part is a process of its own (`part_process`), and what it found stays in a folder,
so that a run that was cut off goes on where it was. `--small` runs all of them on a CPU, to see that they work.
"""
