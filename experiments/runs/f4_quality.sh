#!/usr/bin/env bash
# F4: bits per byte against the violation over its floor, on equal tokens: 43 small runs, some 10 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs
./lab bench training --part quality --json runs/f4_quality.json --plots runs/f4_quality "$@"
