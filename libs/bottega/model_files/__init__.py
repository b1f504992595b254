"""Model folders in Diffusers' layout: recognizes a folder's kind, and checks whether the suite can serve it. No torch.

`folder_check.check_model_folder` reads configurations, indexes and the headers of safetensors files, never a weight.
`bottega doctor`, `bottega up`, `bottega config check` and the front process of a worker call it, so that all of them
give the same answer.

Rules about one part's configuration are plain functions from the parsed configuration to sentences, one file for each
kind of part: `unet_rules`, `vae_rules`, `text_encoder_rules`, `scheduler_rules`.
"""
