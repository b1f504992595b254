"""Converts single files in the layout of Stable Diffusion's first authors to folders in Diffusers' layout, offline.

`bottega models import` runs it in a process of its own (`python -m bottega.worker.conversion FILE FOLDER`).
Configurations are derived from the tensors' shapes (`bottega.model_files.single_file_config`), tokenizers come from
CLIP's merges, which lie beside this file with their licence (`tokenizers`), and Diffusers' own converters rename the
tensors (`tensors`). One part at a time is in memory. Parts of other models' folders are links.
"""
