"""An import process: `python -m bottega.loras.importing.process --fd N` answers one LoraImportCall and exits.

Strangers' files are opened here, where a crash, a hang or a flood of memory takes only this process along. Its parent
sets the limits and the deadline. The first answer says that it is ready.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bottega.errors import BadLora, ConfigError
from bottega.lora import canonical
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert
from bottega.process import Channel
from bottega.v1.lora_import_pb2 import LoraImportAnswer, LoraImportCall


def main() -> None:
    """Serves one call."""
    parser = argparse.ArgumentParser(description="Bottega's LoRA import; started by its store")
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel.from_fd(parser.parse_args().fd)
    channel.send(LoraImportAnswer().SerializeToString())
    if (frame := channel.recv()) is not None:
        channel.send(_answer(LoraImportCall.FromString(frame)).SerializeToString())


def _answer(call: LoraImportCall) -> LoraImportAnswer:
    try:
        converted = convert(Path(call.source), adapter_config=call.adapter_config, base=read_base(Path(call.base)))
        with Path(call.output).open("r+b") as output:
            canonical.write(output, converted.modules)
            output.flush()
            os.fsync(output.fileno())
    except (BadLora, ConfigError) as error:
        return LoraImportAnswer(refusal=error.message)
    except OSError as error:
        return LoraImportAnswer(refusal=f"a file cannot be read or written: {error.strerror}")
    except MemoryError:
        return LoraImportAnswer(refusal="the file needs more memory than an import may have")
    return LoraImportAnswer(trigger_phrase=converted.trigger_phrase, format=converted.format)


if __name__ == "__main__":
    main()
