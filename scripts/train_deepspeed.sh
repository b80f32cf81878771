#!/usr/bin/env bash
# Runs a recipe on several processes of this machine, one for each GPU (or each of GPUS on a CPU):
#
#   GPUS=8 scripts/train_deepspeed.sh +recipe=NAME [key=value ...]
#
# Two launches at once need two ports (PORT=29501). The deepspeed command does not pass SIGTERM on
# to its workers: under a scheduler that stops jobs with it, start with torchrun instead.
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: [GPUS=N] [PORT=N] $0 +recipe=NAME [key=value ...]" >&2
  exit 2
fi

if [[ -z "${GPUS:-}" ]]; then
  GPUS="$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" || true
  [[ "$GPUS" -ge 1 ]] || GPUS=1
fi

exec deepspeed --num_gpus "$GPUS" --master_port "${PORT:-29500}" --module medusa_train "$@"
