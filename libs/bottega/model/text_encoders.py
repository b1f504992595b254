"""The text encoders of a model: encoded texts, the location of the encoders' weights, and a cache of encoded texts.

T5 of Stable Diffusion 3 has more weights than the denoising network. An encoder that is kept on the host takes device
memory for one block of layers: the blocks' weights are copied to the device one after the other, each before it
computes, and the copies are dropped after it. The host's weights do not change, so nothing is copied back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bottega.caching.lru_cache import LruCache
from bottega.device.device import Device

# Entries of a cache, each of which takes some hundred bytes beside its tensors. An embedding of SDXL has 300 KB.
_MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedText:
    """A text as the text encoders of a family encode it."""

    prompt: Tensor
    """[tokens, features]."""
    added: Mapping[str, Tensor]
    """Further conditions; see `Embeds.added`."""
    summary: Tensor
    """One vector for the whole text, by which similar prompts are found, [features]."""

    def to(self, dtype: torch.dtype) -> EncodedText:
        """Return a copy with tensors of `dtype`, because text encoders may use another type than the network."""
        added = {name: tensor.to(dtype) for name, tensor in self.added.items()}
        return EncodedText(prompt=self.prompt.to(dtype), added=added, summary=self.summary.to(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoderSettings:
    """An operator's settings of a text encoder."""

    dtype: torch.dtype | None = None
    """Element type in which it computes; None for that of the model."""
    on_host: bool = False
    """Whether its weights are kept in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """The memory of a text encoder that is kept on the host."""

    host: int
    """Bytes of its weights in pinned host memory."""
    device: int
    """Bytes of its largest block, which is on the device while it computes."""


class _Visit:
    """The hooks that bring a module's weights to the device for each of its forwards.

    Args:
        tensors: Parameters and buffers, in pinned host memory.
        device: The device.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._kept: list[Tensor] = []

    # A tensor that is made in inference mode could never be a parameter's again outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, *_: object) -> None:
        """Copy the weights to the device. The copies are in the order of the stream, so that nothing waits for them."""
        self._kept = [tensor.data for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.data = tensor.data.to(self._device, non_blocking=True, copy=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def end(self, *_: object) -> None:
        """Drop the copies."""
        for tensor, kept in zip(self._tensors, self._kept, strict=False):
            tensor.data = kept
        self._kept = []


@torch.no_grad()
def keep_on_host(encoder: nn.Module, device: Device) -> HostBytes:
    """Keep the weights of a text encoder in pinned host memory, and copy them to the device block by block.

    Args:
        encoder: On the host.
        device: The device on which it computes.
    """
    largest, pinned = 0, dict[int, int]()
    for module, tensors in _blocks(encoder):
        for tensor in tensors:
            if id(tensor) not in pinned:  # Two modules may share one, such as the table of token embeddings.
                tensor.data = device.empty_pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor.data)
                pinned[id(tensor)] = _pinned_bytes(tensor)
        visit = _Visit(tensors, device.torch_device)
        module.register_forward_pre_hook(visit.begin)
        module.register_forward_hook(visit.end, always_call=True)
        largest = max(largest, sum(tensor.nbytes for tensor in tensors))
    return HostBytes(host=sum(pinned.values()), device=largest)


def _blocks(encoder: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield the modules whose weights are on the device together, with their parameters and buffers.

    These are the blocks of layers and, outside of blocks, every module that has weights of its own.
    """
    within: set[nn.Module] = set()
    for module in encoder.modules():
        if isinstance(module, nn.ModuleList) and module not in within:
            for block in module:
                within.update(block.modules())
                yield block, [*block.parameters(), *block.buffers()]
    for module in encoder.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and module not in within:
            yield module, own


def _pinned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in pinned memory, which torch's allocator rounds up to a power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h.
    """
    return 1 << max(0, tensor.nbytes - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CachedText:
    text: EncodedText
    is_idle: bool = True

    @property
    def size_bytes(self) -> int:
        tensors = {id(tensor): tensor.nbytes for tensor in (self.text.prompt, self.text.summary)}
        tensors |= {id(tensor): tensor.nbytes for tensor in self.text.added.values()}
        return sum(tensors.values())


class TextCache:
    """A cache of encoded texts in the device's memory, limited in bytes. The least recently used one is evicted first.

    Callers use `JobTexts`, which makes the keys. The engine's thread makes all calls.

    Args:
        budget_bytes: Maximum bytes of all texts; 0 for no cache.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        self.hits = 0
        """Texts that were found."""
        self.misses = 0
        """Texts that had to be encoded."""
        self._budget_bytes = budget_bytes
        self._texts: LruCache[_CachedText] = LruCache(budget_bytes=budget_bytes, max_entries=_MAX_ENTRIES)

    @property
    def used_bytes(self) -> int:
        """Bytes of all texts."""
        return self._texts.used_bytes

    def find(self, key: str) -> EncodedText | None:
        """Return a text, and count a hit or a miss; None if it is not there, or there is no cache."""
        if not self._budget_bytes:
            return None
        entry = self._texts.use(key)
        self.hits += entry is not None
        self.misses += entry is None
        return entry.text if entry is not None else None

    def add(self, key: str, text: EncodedText) -> None:
        """Add a text, unless it is larger than the budget."""
        entry = _CachedText(text=text)
        if self._budget_bytes and self._texts.make_room(entry.size_bytes) is not None:
            self._texts.add(key, entry)


@dataclass(slots=True, kw_only=True)
class JobTexts:
    """The encoded texts of one job: those that the cache has, and those that the job has encoded.

    An embedding is a function of what the key contains: the tokens of each text encoder, which are those of all prompts
    at their lengths, with the weights of words in brackets and the tokens of textual inversion; `clip_skip`; and the
    LoRAs and embeddings in the text encoders. Model and element types are those of the process.

    The key contains the tenant too. A text that is found is encoded in no time, and the provenance shows that. If
    tenants shared entries, one of them could send a prompt to learn whether another one has used it. The price is that
    a text which many tenants use, such as the empty one, is encoded once for each of them. A tenant may evict the texts
    of others, which tells them nothing but that it works.
    """

    cache: TextCache
    tenant: str = ""
    changes: tuple[tuple[str, object], ...] = ()
    """Digests of LoRAs and embeddings that change the text encoders, with scales and tokens, in their order."""
    _found: dict[str, EncodedText] = field(default_factory=dict)

    def key(self, what: object) -> str:
        """Return the key of a text.

        Args:
            what: Tuples of numbers and texts, and dataclasses of them, which say what is encoded.
        """
        return hashlib.sha256(repr((self.tenant, self.changes, what)).encode()).hexdigest()

    def find(self, key: str) -> EncodedText | None:
        """Return a text; None if it has to be encoded."""
        if key not in self._found and (text := self.cache.find(key)) is not None:
            self._found[key] = text
        return self._found.get(key)

    def add(self, key: str, text: EncodedText) -> None:
        """Add a text that was encoded."""
        self._found[key] = text
        self.cache.add(key, text)
