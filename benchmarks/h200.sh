#!/bin/sh
# The tables of NVIDIA GPUs, one after the other: what the machine can do, a training step on one GPU beside its peers,
# and, with several GPUs, data parallel training. Results are written; nothing is installed.
#
#     sh benchmarks/h200.sh                                  # everything with this Python
#     PYTHON=python3 PYTHON_TORCH=/opt/torch/bin/python WORKS=lora,full sh benchmarks/h200.sh
#
# PYTHON        has allhands, the CUDA build of MLX (pip install 'mlx[cuda13]' or 'mlx[cuda12]') and mlx-lm
# PYTHON_TORCH  has PyTorch with CUDA, transformers and peft (PYTHON, unless told otherwise)
# WORKS, STEPS  what gpu.py measures (all four) and how many steps count (30)
# BUILT         1: all kernels are built side by side before gpu.py measures (first steps are then those of a later process)
# GPUS          what gpu_many.py measures (of 1,2,4,8 those that are here)
# MANY_WORKS    and on what (full,smol,lora)
# MODEL         a model's directory, with a chat template, for startup.py
# STORIES       a folder with train.jsonl and valid.jsonl: pretrain.py learns from it, on all GPUs
# RESULTS       where the records go (benchmarks/results)
# COMMIT        what to call the code, where there is no git
set -u

here=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}
PYTHON_TORCH=${PYTHON_TORCH:-$PYTHON}
ALLHANDS_BENCHMARK_RESULTS=${RESULTS:-$here/results}
ALLHANDS_BENCHMARK_COMMIT=${COMMIT:-}
PYTHONPATH=$here/../src${PYTHONPATH:+:$PYTHONPATH}
export ALLHANDS_BENCHMARK_RESULTS ALLHANDS_BENCHMARK_COMMIT PYTHONPATH

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -eq 0 ]; then
  echo "no NVIDIA GPU answers (nvidia-smi -L): use make bench for a CPU" >&2
  exit 2
fi
if ! "$PYTHON" -c 'import allhands, mlx.core as mx, sys; import mlx_lm; sys.exit(not mx.cuda.is_available())'; then
  echo "$PYTHON lacks mlx-lm or the CUDA build of MLX: pip install 'mlx[cuda13]' mlx-lm, or set PYTHON" >&2
  exit 2
fi
peers=allhands,allhands-lazy,mlx_lm
many=allhands
if "$PYTHON_TORCH" -c 'import sys, torch, transformers, peft; sys.exit(not torch.cuda.is_available())'; then
  peers=$peers,torch,torch-compiled
  many=$many,torch,torch-compiled
else
  echo "$PYTHON_TORCH lacks PyTorch with CUDA, transformers or peft: their columns are left out" >&2
fi
pythons=mlx=$PYTHON,torch=$PYTHON_TORCH

failed=
run() {
  echo "== $*" >&2
  "$PYTHON" "$@" --write || failed="$failed $(basename "$1")"
}
run "$here/ceilings.py" --python "$pythons"
run "$here/gpu.py" --python "$pythons" --peers "$peers" --steps "${STEPS:-30}" ${WORKS:+--works "$WORKS"} \
  ${BUILT:+--built}
# mlx_lm builds its kernels in the first start, which does not count.
run "$here/startup.py" --models tiny ${MODEL:+--model "$MODEL"} --kinds 1,2,3,4,7 --timeout 300
if [ "$gpus" -gt 1 ]; then
  run "$here/gpu_many.py" --python "$pythons" --peers "$many" --steps "${STEPS:-30}" ${GPUS:+--gpus "$GPUS"} \
    ${MANY_WORKS:+--works "$MANY_WORKS"}
fi
if [ -n "${STORIES:-}" ]; then
  run "$here/pretrain.py" --python "$pythons" --data "$STORIES" --ranks "$gpus" --shape smollm2-135m --vocabulary 4096 \
    --block-size 512 --batch-size $((32 * gpus)) --iters 400 --learning-rate 1e-3 --peers "$(echo "$many" | sed 's/,torch,/,/')"
fi
"$PYTHON" "$here/regressions.py" --results "$ALLHANDS_BENCHMARK_RESULTS" || failed="$failed regressions.py"
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
