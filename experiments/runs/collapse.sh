#!/usr/bin/env bash
# Four causes of a collapse, with and without control: 60 small runs, some 13 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs
./lab bench training --part collapse --json runs/collapse.json --plots runs/collapse "$@"
