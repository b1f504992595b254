"""Graphs: what a forward launches on a device, recorded once for its shapes and launched as a whole from then on.

capture    how a device records and launches again
recorded   the segments of one shape, over memory that stays where it is
store      those of all shapes that come often, within bounds
backbone   the denoising network by them, and as it is where they cannot
graphs     the acceleration
"""
