#!/usr/bin/env bash
# Lints the contract, and compares what callers of the suite use, image.proto and generation.proto, with the image of
# them in public.binpb, so that no change breaks a caller. The image needs neither tags nor history nor a network. It was
# made when the files got the options of other languages, and is made anew when a release adds to the contract, in
# protos/, by
#   buf build --path bottega/v1/image.proto --path bottega/v1/generation.proto --exclude-source-info -o public.binpb
# Needs npm, which brings buf's binary; says so and stops well where there is none.
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
echo "buf breaking: image.proto and generation.proto"
"$buf" breaking --against public.binpb --path bottega/v1/image.proto --path bottega/v1/generation.proto
