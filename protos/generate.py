"""Generates the Python stubs of the contract beside the .proto files.

Run by the build (setup.py) at install and by `make protos` after an edit. Needs grpcio-tools and
mypy-protobuf, which the build requires.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(root: Path = ROOT) -> None:
    """Writes *_pb2.py, *_pb2_grpc.py and their .pyi next to each .proto under `root`.

    Raises RuntimeError when protoc refuses a file; it has printed why.
    """
    sources = sorted(str(path.relative_to(root)) for path in root.glob("bottega/v1/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{root}",
            f"-I{well_known}",
            f"--python_out={root}",
            f"--grpc_python_out={root}",
            f"--mypy_out=quiet:{root}",
            f"--mypy_grpc_out=quiet:{root}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}; see the lines above")


if __name__ == "__main__":
    generate()
    print(f"stubs written under {ROOT / 'bottega' / 'v1'}", file=sys.stderr)
