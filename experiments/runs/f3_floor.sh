#!/usr/bin/env bash
# f3_floor: rows and plots of `counterpoise bench control --part floor` in runs/f3_floor
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs/f3_floor
./lab bench control --part floor --part suite --json runs/f3_floor/rows.json --plots runs/f3_floor "$@"
