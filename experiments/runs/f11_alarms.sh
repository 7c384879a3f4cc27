#!/usr/bin/env bash
# F11: delay of the collapse monitor's alarms against false ones. Some 5 minutes on one core.
# With a recorded load: TRACE=FILE experiments/runs/f11_alarms.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p runs
./lab bench alarms --part false --part delay --part speed --json runs/f11_alarms.json --plots runs/f11_alarms
if [[ -n "${TRACE:-}" ]]; then
    ./lab bench alarms --part trace --trace "$TRACE" --json runs/f11_alarms_trace.json --plots runs/f11_alarms
fi
