#!/usr/bin/env bash
# f1_gain_delay: rows and plots of `counterpoise bench control --part gain-delay` in runs/f1_gain_delay
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs/f1_gain_delay
./lab bench control --part gain-delay --json runs/f1_gain_delay/rows.json --plots runs/f1_gain_delay "$@"
