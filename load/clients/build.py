"""Generates the contract's stubs for Go or TypeScript, and compiles the example client.

`python -m load.clients.build go FOLDER` does it from the command line. TypeScript's packages are installed by npm,
once. Go's come from Debian (`PACKAGES`), so that no module proxy is needed. gRPC of Debian 12 has an old codec: with
it the program compiles, but stops at the first answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from grpc_tools import protoc

Language = Literal["go", "typescript"]

PACKAGES = "golang-go golang-google-grpc-dev golang-google-protobuf-dev protoc-gen-go protoc-gen-go-grpc"
"""Debian packages with Go, its plugins for protoc, and gRPC."""

_HERE = Path(__file__).resolve().parent
_PROTOS = _HERE.parents[1] / "protos"
# The files that a caller needs (protos/README.md).
_FILES = tuple(f"bottega/v1/{name}.proto" for name in ("image", "generation", "error", "trace"))
_GO_LIBRARIES = Path("/usr/share/gocode")
_NPM_LISTS = ("package.json", "package-lock.json")
_TIMEOUT_S = 300.0


def missing(language: Language) -> str:
    """Return why a language's client cannot be built here; empty if it can."""
    commands = {"go": ("go", "protoc-gen-go", "protoc-gen-go-grpc"), "typescript": ("node", "npm")}[language]
    absent = [command for command in commands if shutil.which(command) is None]
    if language == "go" and not (_GO_LIBRARIES / "src/google.golang.org/grpc").is_dir():
        absent.append("gRPC for Go")
    advice = f"apt install {PACKAGES}" if language == "go" else "Node.js 20 has both"
    return f"there is no {' and no '.join(absent)} here ({advice})" if absent else ""


def build(language: Language, folder: Path) -> Sequence[str]:
    """Write the stubs and the compiled client into an empty folder. Return the command that runs the client.

    Raises:
        RuntimeError: The stubs cannot be generated.
        subprocess.CalledProcessError: The client does not compile.
    """
    return _build_go(folder) if language == "go" else _build_typescript(folder)


def _build_go(folder: Path) -> Sequence[str]:
    sources = folder / "src"
    sources.mkdir()
    _generate(f"--go_out={sources}", f"--go-grpc_out={sources}")
    program = folder / "draw"
    path = f"{folder}{os.pathsep}{_GO_LIBRARIES}"
    variables = {"GO111MODULE": "off", "GOPATH": path, "GOFLAGS": ""}
    _run(["go", "build", "-o", str(program), str(_HERE / "draw.go")], variables=variables)
    return [str(program)]


def _build_typescript(folder: Path) -> Sequence[str]:
    modules, stubs = installed_modules(_HERE, "client_example"), folder / "gen"
    stubs.mkdir()
    (folder / "node_modules").symlink_to(modules)
    for name in ("draw.ts", "package.json"):
        shutil.copyfile(_HERE / name, folder / name)
    _generate(
        f"--plugin=protoc-gen-es={modules}/.bin/protoc-gen-es",
        f"--es_out={stubs}",
        "--es_opt=target=ts,import_extension=js",
    )
    options = ("--strict", "--module", "nodenext", "--target", "es2022", "--types", "node", "--skipLibCheck")
    _run([f"{modules}/.bin/tsc", *options, "draw.ts"], cwd=folder)
    return ["node", str(folder / "draw.js")]


def installed_modules(source: Path, name: str) -> Path:
    """Return the folder of the packages in a package-lock.json, which are installed where it has changed.

    Args:
        source: Folder of package.json and package-lock.json.
        name: Of the folder beside Python's packages.
    """
    folder = Path(sys.prefix) / name
    done, wanted = folder / "node_modules" / ".installed", (source / _NPM_LISTS[-1]).read_text(encoding="utf-8")
    if not done.is_file() or done.read_text(encoding="utf-8") != wanted:
        folder.mkdir(exist_ok=True)
        for each in _NPM_LISTS:
            shutil.copyfile(source / each, folder / each)
        _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder)])
        done.write_text(wanted, encoding="utf-8")
    return folder / "node_modules"


def _generate(*options: str) -> None:
    well_known = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{_PROTOS}", f"-I{well_known}", *options, *_FILES])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}; see the lines above")


def _run(
    command: Sequence[str], *, cwd: Path | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, cwd=cwd, env={**os.environ, **variables})


def main() -> int:
    """Build the client of a language and print the command that runs it. Return the exit status."""
    languages = get_args(Language)
    if len(sys.argv) != 3 or sys.argv[1] not in languages:
        print(f"usage: python -m load.clients.build {'|'.join(languages)} FOLDER", file=sys.stderr)
        return 2
    language: Language = "go" if sys.argv[1] == "go" else "typescript"
    if why := missing(language):
        print(why, file=sys.stderr)
        return 1
    folder = Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True)
    print(*build(language, folder), "HOST:PORT PROMPT FILE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
