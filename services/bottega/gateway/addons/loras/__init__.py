"""LoRAs: what a name stands for, what a worker lacks of a set, and what the stores load ahead."""
