"""The LoRA store: a catalogue, files in canonical form, a tier in memory, and links that send them to workers.

Untrusted files are opened in a process of their own (importing); nothing here imports torch.
"""
