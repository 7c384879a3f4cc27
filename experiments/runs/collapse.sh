#!/usr/bin/env bash
# Three causes of a collapse, with and without control: 45 small runs, some 12 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs
./lab bench training --part collapse --json runs/collapse.json --plots runs/collapse "$@"
