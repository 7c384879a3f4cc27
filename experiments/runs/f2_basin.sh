#!/usr/bin/env bash
# f2_basin: rows and plots of `counterpoise bench control --part basin` in runs/f2_basin
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs/f2_basin
./lab bench control --part basin --json runs/f2_basin/rows.json --plots runs/f2_basin "$@"
