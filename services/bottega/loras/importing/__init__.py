"""How an untrusted LoRA becomes canonical: in a short-lived process with limits, matched name by name with its base.

Diffusers' own converters are not used: they give kohya's alphas to other modules than theirs, drop what they do not
know, and need torch. Here every name is looked up among the base model's own modules, and what is not found is
refused, with the list.
"""
