"""The canonical form of a LoRA: one safetensors file, whose SHA-256 is the LoRA's digest.

    __metadata__  {"format": "bottega.lora/1"}, and nothing else; "bottega.lora/2" if a module has other tensors than
                  the first three; {"format": "bottega.lora/3", "token": "<cat>"} for a textual inversion embedding
                  "ignored" beside the format has the layers of the LoRA's file that matched nothing, each in a line
    tensors       of each module, as <component>.<module path>.<part>:
                  scale       F32, []: alpha / rank
                  down, up    low-rank factors: [rank, in] or [rank, in, height, width], and [out, rank] or
                              [out, rank, 1, 1]
                  full        a whole matrix or convolution in place of down and up
                  down2, up2  a second low-rank product, by which the first is multiplied element by element (LoHa)
                  kron        [a, b], whose Kronecker product with the former is the change (LoKr)
                  magnitude   norms of the changed weight, [out, 1, ...], as PEFT defines DoRA
                  dora_scale  norms of the changed weight, [out, 1, ...] or [1, in, ...], as LyCORIS defines DoRA
                  norm        [channels], added to the weight of a normalisation layer
                  bias        [out], added to the module's bias
                  vectors     [vectors, features]: embeddings of the token, one after the other, of the only module
                              of a text encoder, token_embedding; the scale is 1
    data          two sections without gaps: the text encoders' tensors, then those of the denoising network, `unet`
                  or `transformer`. A prompt is encoded once the first has arrived. Within a section: scales, then
                  larger items first, then by name

Within a host, the file is passed as it lies in memory. Over a network, the header and the text encoders' section (one
zero byte if it is empty) come first, then the other section in pieces: see messages.py.
"""

from __future__ import annotations

import json
import math
import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO

from bottega.addons.loras.wire.module_parts import (
    BIAS,
    CLIP_ENCODERS,
    COMPONENTS,
    DENOISERS,
    DOWN,
    PARTS,
    PLAIN,
    SCALE,
    UP,
    VECTORS,
    check_parts,
    check_shapes,
    check_vectors,
    is_low_rank,
    refuse,
    weight_shape,
)
from bottega.errors import BadLora
from bottega.safetensors_header import (
    ITEM_BYTES,
    LENGTH_BYTES,
    MAX_NAME_BYTES,
    Header,
    HeaderError,
    TensorEntry,
    parse_header,
    read_header,
)

FORMAT = "bottega.lora/1"
EXPANDED_FORMAT = "bottega.lora/2"
"""Format of a file with modules that are not only low-rank factors."""
EMBEDDING_FORMAT = "bottega.lora/3"
"""Format of a textual inversion embedding."""
EMBEDDING_KIND = "textual inversion"
"""What an embedding has in place of the format of a LoRA's file."""
MAX_IGNORED = 256
"""Upper bound on the layers of a file that match nothing, of a LoRA that is stored in part."""
# SDXL's UNet has about 800 modules with weights, its text encoders 264. Stable Diffusion 3.5 has about as many.
MAX_MODULES = 4096
# A LoRA of rank 512 on all of SDXL would take some GiB.
MAX_FILE_BYTES = 8 << 30
# All weights of SDXL take 13 GiB in F32.
MAX_EXPANDED_BYTES = 16 << 30
MAX_TOKEN_CHARACTERS = 200
# Characters that a weighted prompt, or the list of embeddings in a picture's file, reads in another way.
_NOT_IN_TOKENS = frozenset("()[]\\,:")
TOKEN_RULE = (
    f"must have 1 to {MAX_TOKEN_CHARACTERS} printable characters, without spaces, capitals and any of "
    f"{' '.join(sorted(_NOT_IN_TOKENS))}"
)
"""Rule of `is_token`, for messages."""
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
# Sections begin at whole cache lines.
_HEADER_ALIGNMENT = 64
# CLIP's text towers have their encoder in this module or at their root, depending on class and transformers version.
_TEXT_MODEL = "text_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module that a LoRA changes.

    The entries' `begin` and `end` are byte offsets in the component's section.
    """

    component: str
    """Component of the model: one of COMPONENTS."""
    path: str
    """Path of the module in the component."""
    parts: Mapping[str, TensorEntry]
    """Its tensors by the last word of their names."""

    @property
    def scale(self) -> TensorEntry:
        return self.parts[SCALE]

    @property
    def down(self) -> TensorEntry:
        """The first factor of the first product, which some kinds do not have."""
        return self.parts[DOWN]

    @property
    def up(self) -> TensorEntry:
        """The second factor of the first product, which some kinds do not have."""
        return self.parts[UP]

    @property
    def rank(self) -> int:
        """Rank of the first product; 0 without one."""
        return self.down.shape[0] if DOWN in self.parts else 0

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the weight that it changes; None if it changes only a bias."""
        return weight_shape({part: entry.shape for part, entry in self.parts.items()})

    @property
    def outputs(self) -> int:
        """Number of outputs of the module."""
        return (self.shape or self.parts[BIAS].shape)[0]

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the change as a whole weight in F32; 0 if it stays in low-rank factors."""
        return 0 if is_low_rank(self.parts) else 4 * math.prod(self.shape or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalLora:
    """The parsed header of a canonical file."""

    header_bytes: int
    text_bytes: int
    """Bytes of the text encoders' section."""
    denoiser_bytes: int
    """Bytes of the denoising network's section."""
    modules: tuple[Module, ...]
    """The modules, in the order of their scales in the file."""
    token: str = ""
    """Token of a textual inversion embedding; "" for a LoRA."""
    ignored: tuple[str, ...] = ()
    """Layers of the LoRA's file that matched nothing in the base model."""

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.header_bytes + self.text_bytes + self.denoiser_bytes

    @property
    def rank(self) -> int:
        """The highest rank among the modules."""
        return max(module.rank for module in self.modules)

    @property
    def size(self) -> int:
        """Number of modules; of an embedding, the largest number of vectors for a text encoder."""
        if not self.token:
            return len(self.modules)
        return max(module.parts[VECTORS].shape[0] for module in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleWeights:
    """The weights of one module, for writing a canonical file."""

    component: str
    path: str
    scale: float
    parts: Mapping[str, TensorData]
    """All tensors but the scale, by the last word of their names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorData:
    """A tensor's row-major, little-endian elements."""

    dtype: str
    """Element type: one of DTYPES."""
    shape: tuple[int, ...]
    data: bytes | memoryview


def spellings(component: str, path: str) -> tuple[str, ...]:
    """Return the paths that may mean the same module of a component, the given path first.

    Transformers 5 dropped `text_model.` from CLIPTextModel's modules but kept it in CLIPTextModelWithProjection, so
    model folders, LoRA files and loaded networks each may or may not have it.
    """
    if component not in CLIP_ENCODERS:
        return (path,)
    if path.startswith(_TEXT_MODEL):
        return (path, path.removeprefix(_TEXT_MODEL))
    return (path, _TEXT_MODEL + path)


def is_token(text: str) -> bool:
    """Return whether a text may be the token of an embedding; see `TOKEN_RULE`.

    Tokenizers change capitals and the composition of characters before they look for tokens.
    """
    return (
        0 < len(text) <= MAX_TOKEN_CHARACTERS
        and text.isprintable()
        and not any(character.isspace() or character in _NOT_IN_TOKENS for character in text)
        and text == normalised_token(text)
    )


def normalised_token(text: str) -> str:
    """Return a token as CLIP's tokenizers read it."""
    return unicodedata.normalize("NFC", text).lower()


@contextmanager
def headers_of_loras() -> Iterator[None]:
    """Convert errors about safetensors headers in the `with` block to BadLora."""
    try:
        yield
    except HeaderError as error:
        raise BadLora(f"the file is not an acceptable safetensors file: {error}") from None


def read(file: BinaryIO) -> CanonicalLora:
    """Parse the header of an open file. Raise BadLora that names the broken rule, or OSError."""
    with headers_of_loras():
        return _checked(read_header(file))


def parse(head: bytes, *, file_bytes: int) -> CanonicalLora:
    """Parse a header that arrived over a connection. Raise BadLora that names the broken rule.

    Args:
        head: A copy, not memory that the sender may still change.
        file_bytes: Bytes of header and sections together.
    """
    with headers_of_loras():
        return _checked(parse_header(head, file_bytes=file_bytes))


def write(file: BinaryIO, modules: Iterable[ModuleWeights], *, token: str = "", ignored: Sequence[str] = ()) -> None:
    """Write a LoRA from the beginning of the file. The same modules give the same bytes, whatever their order.

    Raises BadLora for content that `read` would refuse, or OSError.

    Args:
        file: Where it is written.
        modules: Its modules.
        token: Token of an embedding; "" for a LoRA.
        ignored: Layers of the LoRA's file that matched nothing in the base model.
    """
    written = list(modules)
    pieces = sorted(_pieces(written), key=lambda piece: _order(piece.name, piece.weights.dtype))
    plain = all(module.parts.keys() == PLAIN - {SCALE} for module in written)
    metadata = {"format": FORMAT if plain else EXPANDED_FORMAT}
    if token:
        metadata = {"format": EMBEDDING_FORMAT, "token": token}
    if ignored:
        metadata["ignored"] = "\n".join(ignored)
    head = _head(pieces, metadata)
    with headers_of_loras():
        _checked(parse_header(head, file_bytes=len(head) + sum(len(piece.weights.data) for piece in pieces)))
    file.write(head)
    file.writelines(piece.weights.data for piece in pieces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    name: str
    weights: TensorData


def _pieces(modules: Iterable[ModuleWeights]) -> Iterator[_Piece]:
    for module in modules:
        prefix = f"{module.component}.{module.path}"
        scale = TensorData(dtype="F32", shape=(), data=struct.pack("<f", module.scale))
        for part, weights in {SCALE: scale, **module.parts}.items():
            yield _Piece(name=f"{prefix}.{part}", weights=weights)


def _head(pieces: Sequence[_Piece], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for piece in pieces:
        begin, end = end, end + len(piece.weights.data)
        shape = list(piece.weights.shape)
        fields[piece.name] = {"dtype": piece.weights.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(text)) % _HEADER_ALIGNMENT
    return (len(text) + padding).to_bytes(LENGTH_BYTES, "little") + text + b" " * padding


def _checked(header: Header) -> CanonicalLora:
    metadata, plain = dict(header.metadata), {"format": FORMAT}
    ignored = tuple(metadata.pop("ignored", "").splitlines())
    if len(ignored) > MAX_IGNORED or not all(
        0 < len(name) <= MAX_NAME_BYTES and name.isprintable() for name in ignored
    ):
        refuse(f"ignored is not a list of at most {MAX_IGNORED} layers")
    token = metadata.pop("token", "") if metadata.get("format") == EMBEDDING_FORMAT else ""
    if metadata not in (plain, {"format": EXPANDED_FORMAT}) and not (is_token(token) and len(metadata) == 1):
        refuse(f"its metadata is not {plain}, the same with {EXPANDED_FORMAT}, or that of an embedding with its token")
    if not header.tensors:
        refuse("it has no tensors")
    if header.size_bytes + header.data_bytes > MAX_FILE_BYTES:
        refuse(f"it has {header.data_bytes} bytes; at most {MAX_FILE_BYTES} are accepted")
    names = [_order(entry.name, entry.dtype) for entry in header.tensors]
    if names != sorted(names):
        refuse("its tensors are not in their order")
    text = [entry for entry in header.tensors if not _is_of_denoiser(entry.name)]
    text_bytes = text[-1].end if text else 0
    modules = tuple(_modules(header.tensors, text_bytes))
    if len(modules) > MAX_MODULES:
        refuse(f"it has {len(modules)} modules; at most {MAX_MODULES} are accepted")
    kinds = {module.parts.keys() == PLAIN for module in modules}
    embeddings = {VECTORS in module.parts for module in modules}
    if (metadata == plain) != (kinds == {True}) or embeddings != {bool(token)}:
        refuse("its format does not go with its tensors")
    expanded_bytes = sum(module.expanded_bytes for module in modules)
    if expanded_bytes > MAX_EXPANDED_BYTES:
        refuse(f"it would expand to {expanded_bytes} bytes; at most {MAX_EXPANDED_BYTES} are accepted")
    return CanonicalLora(
        header_bytes=header.size_bytes,
        text_bytes=text_bytes,
        denoiser_bytes=header.data_bytes - text_bytes,
        modules=modules,
        token=token,
        ignored=ignored,
    )


def _modules(tensors: Sequence[TensorEntry], text_bytes: int) -> Iterator[Module]:
    parts: dict[tuple[str, str], dict[str, TensorEntry]] = {}
    for entry in tensors:
        component, path, part = _name(entry.name)
        offset = text_bytes if component in DENOISERS else 0
        parts.setdefault((component, path), {})[part] = TensorEntry(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            begin=entry.begin - offset,
            end=entry.end - offset,
        )
    for (component, path), found in parts.items():
        name = f"{component}.{path}"[:80]
        if VECTORS in found:
            check_vectors(component, path, found)
        else:
            check_parts(name, found)
        check_shapes(name, found)
        yield Module(component=component, path=path, parts=MappingProxyType(found))


def _name(name: str) -> tuple[str, str, str]:
    """Split a tensor's name into component, module path and the last word, which is one of PARTS."""
    component, _, rest = name.partition(".")
    path, _, part = rest.rpartition(".")
    if component not in COMPONENTS or part not in PARTS or not _PATH.fullmatch(path) or len(name) > MAX_NAME_BYTES:
        refuse(f"it has a tensor {name[:80]!r}, which is no part of a module")
    return component, path, part


def _order(name: str, dtype: str) -> tuple[bool, bool, int, str]:
    """Return the sort key: text encoders first, then scales before weights, larger items first, then by name."""
    return _is_of_denoiser(name), not name.endswith(".scale"), -ITEM_BYTES.get(dtype, 0), name


def _is_of_denoiser(name: str) -> bool:
    return name.partition(".")[0] in DENOISERS
