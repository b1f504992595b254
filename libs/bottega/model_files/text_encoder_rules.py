"""Rules for the configurations of a model's text encoders: which fields have values that are not served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.model_files.field_rules import (
    ANY,
    FRACTION,
    NULL,
    OFF,
    POSITIVE,
    TEXT,
    FieldRule,
    broken_fields,
    number,
    only,
    whole,
    with_defaults,
)

# Activations of transformers that published CLIP text encoders have.
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")

# SDXL's second encoder has 32.
_MOST_LAYERS = 256

TEXT_ENCODER_RULES = (
    FieldRule(
        name="model_type",
        default="clip_text_model",
        values=only("clip_text_model"),
        why="only CLIP's text encoders are served",
    ),
    FieldRule(name="vocab_size", default=49408, values=whole(1)),
    FieldRule(name="hidden_size", default=512, values=whole(1)),
    FieldRule(name="intermediate_size", default=2048, values=whole(1)),
    FieldRule(name="projection_dim", default=512, values=whole(1) | NULL),
    FieldRule(name="num_hidden_layers", default=12, values=whole(1, _MOST_LAYERS)),
    FieldRule(name="num_attention_heads", default=8, values=whole(1)),
    FieldRule(name="max_position_embeddings", default=77, values=whole(1)),
    FieldRule(
        name="hidden_act", default="quick_gelu", values=only(*ACTIVATIONS), why="published text encoders have no other"
    ),
    FieldRule(name="layer_norm_eps", default=1e-5, values=POSITIVE),
    FieldRule(name="attention_dropout", default=0.0, values=FRACTION | NULL),
    FieldRule(name="initializer_range", default=0.02, values=number("a number")),
    FieldRule(name="initializer_factor", default=1.0, values=number("a number")),
    FieldRule(name="pad_token_id", default=1, values=whole(0) | NULL),
    FieldRule(name="bos_token_id", default=49406, values=whole(0) | NULL),
    FieldRule(name="eos_token_id", default=49407, values=whole(0)),
    FieldRule(name="dtype", default=None, values=TEXT | NULL),
    FieldRule(name="return_dict", default=True, values=only(True)),
    FieldRule(name="output_hidden_states", default=False, values=only(False, True, None)),
    FieldRule(name="chunk_size_feed_forward", default=0, values=whole(0)),
    FieldRule(name="is_encoder_decoder", default=False, values=only(False, True)),
    FieldRule(name="transformers_version", default=None, values=TEXT | NULL),
    FieldRule(name="architectures", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="id2label", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="label2id", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="problem_type", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="use_attention_mask", default=None, values=OFF, why="prompts are encoded without an attention mask"),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)


def check_text_encoder_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of a text encoder's config.json whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(TEXT_ENCODER_RULES, config))
    # Rules between fields assume valid fields.
    yield from broken or _broken_together(with_defaults(TEXT_ENCODER_RULES, config))


def _broken_together(config: Mapping[str, Any]) -> Iterator[str]:
    if config["hidden_size"] % config["num_attention_heads"]:
        yield f"hidden_size must be a multiple of num_attention_heads ({config['num_attention_heads']})"
