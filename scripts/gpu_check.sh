#!/usr/bin/env bash
# Checks on one GPU what CPUs cannot show, in under ten minutes, and writes all of it to one file:
#
#   scripts/gpu_check.sh [FOLDER]             # default folder: scripts/results
#   scripts/gpu_check.sh --dry-run FOLDER     # the same on a CPU, with next to no work
#
# It takes the python of .venv where there is one; PYTHON=... names another.
set -euo pipefail

here="$(cd "$(dirname "$0")" && pwd)"
python="$here/../.venv/bin/python"
[[ -x "$python" ]] || python=python3
exec "${PYTHON:-$python}" "$here/gpu_check.py" "$@"
