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
from bottega.errors import BadLora, ConfigError
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import ConvertedLora, convert, sources
from bottega.loras.importing.naming import base_family
from bottega.process import FramedPipe
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
        family = base_family(Path(call.base))
        converted = convert(files, base=read_base(Path(call.base)), family=family)
        return _written(converted, Path(call.output), family)
    except (BadLora, ConfigError) as error:
        return LoraImportAnswer(refusal=error.message)
    except OSError as error:
        return LoraImportAnswer(refusal=f"the store cannot read it: {error.strerror}")
    except MemoryError:
        return LoraImportAnswer(refusal="the file needs more memory than an import may have")


def _written(converted: ConvertedLora, path: Path, family: str) -> LoraImportAnswer:
    try:
        with path.open("r+b") as output:
            canonical.write(output, converted.modules)
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
