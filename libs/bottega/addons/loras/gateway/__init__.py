"""LoRAs: the weights that a name stands for, what a worker lacks of a set, and what the stores prefetch."""
