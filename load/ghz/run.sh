#!/usr/bin/env bash
# Loads a running gateway with ghz, method after method, and judges what ghz reports by load/slo.toml.
# Needs ghz and bottega on the PATH. Ends with 0 where all bounds hold, 1 where one does not, 2 where nothing can be judged.
# usage: load/ghz/run.sh smoke|steady|step [HOST:PORT [FOLDER]]      FOLDER: for the reports; default out/ghz/PROFILE
set -euo pipefail

stop() {
    echo "load/ghz/run.sh: $1" >&2
    exit 2
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
top="$(cd "$here/../.." && pwd)"
profile="${1:-}"
address="${2:-127.0.0.1:8470}"
reports="${3:-$top/out/ghz/$profile}"

[[ -n $profile && -d $here/$profile ]] || stop "which profile? smoke, steady or step"
PATH="$PATH:$top/.venv/bin"
python="$top/.venv/bin/python"
[[ -x $python ]] || python=python3
command -v ghz >/dev/null || stop "ghz is not on the PATH; load/ghz/README.md says how to get it"
command -v bottega >/dev/null || stop "bottega is not on the PATH; make test sets it up in .venv"

# Calls that ask for a job need one that there is.
job="$(bottega generate "a small green circle" --steps 4 --detach --address "$address")" ||
    stop "no job could be submitted at $address"
bottega jobs watch "$job" --timeout 120 --address "$address" >/dev/null || stop "the job $job did not complete"

made="$(mktemp -d "${TMPDIR:-/tmp}/bottega-ghz-XXXXXX")"
trap 'rm -rf "$made"' EXIT
rm -rf "$reports"
mkdir -p "$reports"
for config in "$here/$profile"/*.json; do
    name="$(basename "$config")"
    sed "s/\"JOB_ID\"/\"$job\"/" "$config" >"$made/$name"
    echo "ghz: $profile ${name%.json}"
    ghz --config "$made/$name" --format json --output "$reports/$name" "$address" || stop "ghz failed for $name"
done

cd "$top"
"$python" -m load.gate --profile "$profile" "$reports"/*.json
