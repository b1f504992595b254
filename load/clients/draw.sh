#!/usr/bin/env bash
# Draws a picture of PROMPT over HTTP: draw.sh HOST:PORT PROMPT FILE, where the HTTP API listens at HOST:PORT. It starts a
# job, waits for its end and fetches its picture. BOTTEGA_API_KEY is the key, if the gateway asks for one.
set -euo pipefail
url="http://$1/v1/jobs"
key=(-H "Authorization: Bearer ${BOTTEGA_API_KEY:-none}")
body=$(PROMPT="$2" python3 -c 'import json, os; print(json.dumps({"prompt": os.environ["PROMPT"], "bottega": {"seed": 7}}))')
job=$(curl -sSf "${key[@]}" -H 'Content-Type: application/json' -d "$body" "$url" | python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
curl -sSfN "${key[@]}" "$url/$job/events" | grep '^event: '
curl -sSf "${key[@]}" "$url/$job/images/0" -o "$3"
