#!/usr/bin/env bash
# f5_response: rows and plots of `counterpoise bench control --part response` in runs/f5_response
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs/f5_response
./lab bench control --part response --part speed --json runs/f5_response/rows.json --plots runs/f5_response "$@"
