"""The approximate cache: entries in memory and on the disk, and their way to workers. Imports no torch."""
