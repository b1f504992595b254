"""The families of models that workers serve, and what is true of all published models of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SD15, SD21, SDXL, SD3, FLUX, Z_IMAGE = "sd15", "sd21", "sdxl", "sd3", "flux", "z_image"
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
"""What UNets predict, by the names of Diffusers."""
EPSILON, V_PREDICTION, _ = PREDICTION_TYPES
FLOW = "flow"
"""What models of flow matching predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """The facts that hold for all published models of a family, and which no tensor tells.

    Sources are the folders stable-diffusion-v1-5/stable-diffusion-v1-5, stabilityai/stable-diffusion-2-1 and
    -2-1-base, -xl-base-1.0 and -3-medium-diffusers, and black-forest-labs/FLUX.1-dev.
    """

    title: str
    """Display name."""
    pipeline: str
    """Class in the model_index.json of a folder that is made from a single file."""
    scheduler: str
    """Scheduler class that is written to model_index.json when a single file is converted to a folder."""
    prediction_type: str = EPSILON
    """What its networks predict if nothing says so; UNets for inpainting predict the noise in every family."""
    scaling_factor: float = 0.18215
    """Factor of its latents."""
    shift_factor: float | None = None
    """Shift of its latents, with which its VAE has no convolutions between latents and networks."""
    latent_side: int = 64
    """Side of the latent of its usual pictures."""
    latent_side_of_v: int = 64
    """The same for UNets that predict v."""
    vae_pixels: int = 512
    """Side of the pictures that its VAE was trained with."""
    heads: int | None = None
    """Attention heads of all levels of the UNet; None if heads have 64 channels each."""
    upcasts_attention: bool = False
    """Whether attention is computed in float32: Stable Diffusion 2.1 overflows in float16, and 2.0 draws the same."""
    has_two_encoders: bool = False
    """Whether its UNet has conditions that are added to the timestep's embedding, and a second text encoder."""
    text_prefixes: Mapping[str, tuple[str, ...]]
    """Beginnings of the names of each text encoder's tensors in a single file."""
    open_clip: frozenset[str] = frozenset()
    """Text encoders of OpenCLIP, which pad with "!"."""
    original_names: frozenset[str] = frozenset()
    """Those of them whose tensors have OpenCLIP's names in single files."""


CLIP_PREFIXES = ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.")
OPEN_CLIP = "cond_stage_model.model."
OPEN_CLIP_SDXL = "conditioner.embedders.1.model."
CLIP_L_SD3, CLIP_G_SD3 = "text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer."
T5 = "text_encoders.t5xxl.transformer."

FAMILIES: Mapping[str, FamilyFacts] = {
    SD15: FamilyFacts(
        title="Stable Diffusion 1",
        pipeline="StableDiffusionPipeline",
        scheduler="PNDMScheduler",
        heads=8,
        text_prefixes={"text_encoder": CLIP_PREFIXES[:1]},
    ),
    SD21: FamilyFacts(
        title="Stable Diffusion 2",
        pipeline="StableDiffusionPipeline",
        scheduler="DDIMScheduler",
        # As in Diffusers, a model is taken for 2.1 at 768 pixels.
        prediction_type=V_PREDICTION,
        latent_side_of_v=96,
        upcasts_attention=True,
        text_prefixes={"text_encoder": (OPEN_CLIP,)},
        open_clip=frozenset({"text_encoder"}),
        original_names=frozenset({"text_encoder"}),
    ),
    SDXL: FamilyFacts(
        title="SDXL",
        pipeline="StableDiffusionXLPipeline",
        scheduler="EulerDiscreteScheduler",
        scaling_factor=0.13025,
        latent_side=128,
        latent_side_of_v=128,
        vae_pixels=1024,
        has_two_encoders=True,
        text_prefixes={"text_encoder": CLIP_PREFIXES[1:], "text_encoder_2": (OPEN_CLIP_SDXL,)},
        open_clip=frozenset({"text_encoder_2"}),
        original_names=frozenset({"text_encoder_2"}),
    ),
    SD3: FamilyFacts(
        title="Stable Diffusion 3",
        pipeline="StableDiffusion3Pipeline",
        scheduler="FlowMatchEulerDiscreteScheduler",
        prediction_type=FLOW,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        latent_side=128,
        vae_pixels=1024,
        text_prefixes={"text_encoder": (CLIP_L_SD3,), "text_encoder_2": (CLIP_G_SD3,)},
        open_clip=frozenset({"text_encoder_2"}),
    ),
    FLUX: FamilyFacts(
        title="Flux.1",
        pipeline="FluxPipeline",
        scheduler="FlowMatchEulerDiscreteScheduler",
        prediction_type=FLOW,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        latent_side=128,
        vae_pixels=1024,
        text_prefixes={"text_encoder": (CLIP_L_SD3,), "text_encoder_2": (T5,)},
    ),
}
"""The families of which single files are converted."""
TITLES: Mapping[str, str] = {**{name: family.title for name, family in FAMILIES.items()}, Z_IMAGE: "Z-Image"}
"""Display names of the families whose folders are checked part by part."""

UNET, TRANSFORMER = "unet", "transformer"
"""Parts of the denoising network; a family has one of them."""
PartClass = tuple[str, str]
"""Library and class of a part."""
_CLIP_TEXT = ("transformers", "CLIPTextModel")
_CLIP_PROJECTING = ("transformers", "CLIPTextModelWithProjection")
_CLIP_TOKENIZER = ("transformers", "CLIPTokenizer")
_T5 = ("transformers", "T5EncoderModel")
_T5_TOKENIZER = ("transformers", "T5TokenizerFast")
_VAE = ("diffusers", "AutoencoderKL")
_STABLE_DIFFUSION: Mapping[str, PartClass] = {
    "text_encoder": _CLIP_TEXT,
    "tokenizer": _CLIP_TOKENIZER,
    UNET: ("diffusers", "UNet2DConditionModel"),
    "vae": _VAE,
}
PARTS: Mapping[str, Mapping[str, PartClass]] = {
    SD15: _STABLE_DIFFUSION,
    SD21: _STABLE_DIFFUSION,
    SDXL: {**_STABLE_DIFFUSION, "text_encoder_2": _CLIP_PROJECTING, "tokenizer_2": _CLIP_TOKENIZER},
    SD3: {
        "text_encoder": _CLIP_PROJECTING,
        "text_encoder_2": _CLIP_PROJECTING,
        "text_encoder_3": _T5,
        "tokenizer": _CLIP_TOKENIZER,
        "tokenizer_2": _CLIP_TOKENIZER,
        "tokenizer_3": _T5_TOKENIZER,
        TRANSFORMER: ("diffusers", "SD3Transformer2DModel"),
        "vae": _VAE,
    },
    FLUX: {
        "text_encoder": _CLIP_TEXT,
        "text_encoder_2": _T5,
        "tokenizer": _CLIP_TOKENIZER,
        "tokenizer_2": _T5_TOKENIZER,
        TRANSFORMER: ("diffusers", "FluxTransformer2DModel"),
        "vae": _VAE,
    },
    Z_IMAGE: {
        "text_encoder": ("transformers", "Qwen3Model"),
        "tokenizer": ("transformers", "Qwen2Tokenizer"),
        TRANSFORMER: ("diffusers", "ZImageTransformer2DModel"),
        "vae": _VAE,
    },
}
"""Parts of each family but the scheduler, whose class may differ between models."""
OPTIONAL_PARTS: Mapping[str, frozenset[str]] = {SD3: frozenset({"text_encoder_3", "tokenizer_3"})}
"""Parts that a model may leave out together. Stable Diffusion 3 then reads zeros in place of T5's states."""


def class_of(part: str, family: str) -> str:
    """Return the name of a part's class; that of an unknown family is as in SDXL."""
    return PARTS.get(family, PARTS[SDXL])[part][1]


def denoiser_part(family: str) -> str:
    """Return the part that is the denoising network of a family's models."""
    return TRANSFORMER if TRANSFORMER in PARTS[family] else UNET


def served_titles(families: Iterable[str] = TITLES) -> str:
    """Return the display names of the families that are served, or of some of them, for a sentence."""
    *others, last = (TITLES[family] for family in families)
    return f"{', '.join(others)} and {last}"


def with_article(title: str) -> str:
    """Return a display name with its article, such as "an SDXL"."""
    return f"an {title}" if title == TITLES[SDXL] else f"a {title}"
