#!/usr/bin/env bash
# Lints the contract, and compares it with the one of the newest tag, so that no release breaks a caller.
# Needs npm, which brings buf's binary; says so and stops well where there is none. Knows no service.
set -euo pipefail

readonly VERSION=1.75.0
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
home="$top/.venv/buf"
buf="$home/node_modules/.bin/buf"

if ! command -v npm >/dev/null; then
    echo "buf: skipped, because npm is not installed"
    exit 0
fi
if [[ ! -x $buf || "$("$buf" --version)" != "$VERSION" ]]; then
    npm install --prefix "$home" --no-save --no-audit --no-fund --loglevel=error "@bufbuild/buf@$VERSION"
fi

cd "$top/protos"
echo "buf lint"
"$buf" lint

tag="$(git describe --tags --abbrev=0 2>/dev/null || true)"
if [[ -z $tag ]]; then
    echo "buf breaking: skipped, because there is no tag to compare with"
    exit 0
fi
rm -rf "$home/before"
mkdir -p "$home/before"
git -C "$top" archive "$tag" protos | tar -x -C "$home/before"
echo "buf breaking against $tag"
"$buf" breaking --against "$home/before/protos"
