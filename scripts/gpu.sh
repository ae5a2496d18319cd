#!/bin/sh
# The GPU check, one script of a few minutes: CPU oracles are dumped, replayed through the GPU paths, and timed.
#   sh scripts/gpu.sh [FOLDER]      FOLDER keeps the dumps and the report (default: gpu-check)
# Dumps can be made on a machine without a GPU (python scripts/gpu.py dump FOLDER) and carried over.
set -e
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
[ -x .venv/bin/python ] && PYTHON=.venv/bin/python
OUT=${1:-gpu-check}
[ -e "$OUT/dump.pt" ] || "$PYTHON" scripts/gpu.py dump "$OUT"
"$PYTHON" scripts/gpu.py replay "$OUT"
