"""An import process: `python -m bottega.loras.importing.process --fd N` answers one LoraImportCall and exits.

It opens untrusted files, so that a crash, a hang or excessive memory ends only this process. Its parent sets limits and
a deadline. Its first answer says that it is ready.
"""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.lora_files import MAX_CARD_BYTES, card_base_model, model_card
from bottega.errors import BadLora, ConfigError
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import ConvertedLora, convert, sources
from bottega.loras.importing.embedding import convert_embedding
from bottega.loras.importing.naming import base_family
from bottega.process.child import FramedPipe
from bottega.storage.folders import open_below
from bottega.v1.lora_import_pb2 import LoraImportAnswer, LoraImportCall


def main() -> None:
    """Receive one import call over a pipe, and send its answer."""
    parser = argparse.ArgumentParser(description="Bottega's LoRA import process; the LoRA store starts it")
    parser.add_argument("--fd", type=int, required=True)
    channel = FramedPipe.from_fd(parser.parse_args().fd)
    channel.send(LoraImportAnswer().SerializeToString())
    if (frame := channel.recv()) is not None:
        channel.send(_answer(LoraImportCall.FromString(frame)).SerializeToString())


def _answer(call: LoraImportCall) -> LoraImportAnswer:
    try:
        files = [
            file
            for source in call.sources
            for file in sources(
                Path(source.path),
                source.adapter_config,
                source.component or None,
                root=Path(source.root) if source.root else None,
            )
        ]
        folder = Path(call.base)
        family = base_family(folder)
        base = read_base(folder)
        token = call.trigger_words[0] if call.trigger_words else ""
        converted = convert_embedding(files, base=base, folder=folder, family=family, token=token, name=call.name)
        if converted is not None and len(call.trigger_words) > 1:
            raise BadLora("an embedding has one trigger word, its token")
        card = call.base_model or _card_base_model(Path(call.sources[0].path), call.sources[0].root)
        converted = converted or convert(files, base=base, family=family, card=card, allow_partial=call.allow_partial)
        return _written(converted, Path(call.output), family)
    except (BadLora, ConfigError) as error:
        return LoraImportAnswer(refusal=error.message)
    except OSError as error:
        return LoraImportAnswer(refusal=f"the store cannot read it: {error.strerror}")
    except MemoryError:
        return LoraImportAnswer(refusal="the file needs more memory than an import may have")


def _card_base_model(path: Path, root: str) -> str:
    """Return the base model that the model card of a LoRA names; "" without a card that can be read."""
    try:
        with open_below(model_card(path), Path(root) if root else None) as card:
            return card_base_model(card.read(MAX_CARD_BYTES), file="" if path.is_dir() else path.name)
    except OSError:
        return ""


def _written(converted: ConvertedLora, path: Path, family: str) -> LoraImportAnswer:
    try:
        with path.open("r+b") as output:
            canonical.write(output, converted.modules, token=converted.token, ignored=converted.ignored)
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        if error.errno == errno.EFBIG:
            return LoraImportAnswer(refusal="its canonical form would be larger than an import may write")
        return LoraImportAnswer(errno=error.errno or errno.EIO)
    return LoraImportAnswer(
        trigger_phrase=converted.trigger_phrase, format=converted.format, family=family, note=converted.note
    )


if __name__ == "__main__":
    main()
