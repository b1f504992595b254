"""The LoRA store: a catalogue, files in canonical form, a cache in memory, and connections that send LoRAs to workers.

Untrusted files are opened in separate processes (`importing`). Nothing here imports torch.
"""
