#!/usr/bin/env bash
# Draws one picture with a suite of its own, says where it is and where the time went, and leaves nothing running.
# Needs `bottega` on the PATH; usage: deploy/demo.sh [PROMPT]
set -euo pipefail

prompt="${1:-a big red star on the left on a blue background}"
top="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
picture="$top/out/demo.png"

BOTTEGA_STATE="$(mktemp -d "${TMPDIR:-/tmp}/bottega-demo-XXXXXX")"
export BOTTEGA_STATE
unset BOTTEGA_ADDRESS BOTTEGA_FLEET # of another suite, perhaps
finish() {
    bottega stop
    rm -rf "$BOTTEGA_STATE"
}
trap finish EXIT

mkdir -p "$top/out"
bottega up --detach --port 0 --controlnet-servers 0 # ready sooner
echo "Drawing: $prompt"
# A fixed seed, so that everybody gets the same picture; it was picked by hand for the prompt above.
bottega generate "$prompt" --output "$picture" --seed 14
