#!/bin/sh
# Print the extras of allhands that fit this machine. ALLHANDS_EXTRA overrides the choice.
if [ -n "${ALLHANDS_EXTRA:-}" ]; then
  echo "$ALLHANDS_EXTRA"
elif [ "$(uname -s)" = Darwin ]; then
  echo mpi
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then
  # The driver names the newest CUDA it can run.
  major=$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
  if [ "${major:-0}" -ge 13 ]; then echo cuda13,mpi; else echo cuda12,mpi; fi
else
  echo cpu,mpi
fi
