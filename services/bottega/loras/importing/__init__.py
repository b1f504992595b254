"""Converts untrusted LoRA files to the canonical form, in a short-lived process with limits.

Diffusers' converters are not used: they assign kohya's alphas to the wrong modules, drop unknown tensors silently, and
need torch. Here every tensor name must match a module of the base model. A file with unknown names is refused, and the
error lists them.
"""
