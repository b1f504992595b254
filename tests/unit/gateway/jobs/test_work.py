"""What a complete request asks of a worker."""

from __future__ import annotations

from bottega.gateway.jobs import work
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec


def test_a_guided_request_puts_two_rows_an_image_into_each_turn() -> None:
    spec = GenerationSpec(num_images=3, num_inference_steps=30, guidance_scale=4.5)
    assert (work.rows(spec), work.steps_to_run(spec)) == (6, 30)


def test_an_unguided_image_has_one_row() -> None:
    assert work.rows(GenerationSpec(num_images=1, guidance_scale=1)) == 1


def test_image_to_image_skips_the_first_steps() -> None:
    assert work.steps_to_run(GenerationSpec(num_inference_steps=30, strength=0.5)) == 15


def test_a_latent_is_smaller_by_the_models_factor() -> None:
    spec = GenerationSpec(width=64, height=48)
    assert work.latent_shape(spec, image_pb2.Model(size_multiple=8, vae_scale_factor=4)) == (12, 16)
    assert work.latent_shape(spec, image_pb2.Model(size_multiple=8)) == (6, 8)
