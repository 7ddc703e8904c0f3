#!/usr/bin/env bash
# One RL run from models/chess-tiny with its preset, and the paired comparison with its start on validation scenes 0-511.
#   usage: benchmarks/first_gain.sh OUT [SECONDS] [flowrl-train flags ...]     (one GPU)
# Training stops after SECONDS (default 430) at the end of a step, as by Ctrl-C.
set -euo pipefail
out=${1:?usage: first_gain.sh OUT [SECONDS] [flags ...]}
seconds=${2:-430}
policy=${POLICY:-models/chess-tiny}
episodes=${EVAL_EPISODES:-512}
envs=${ENVS:-96}
run() { "${PYTHON:-python3}" -c "import sys; from flowrl.cli import $1 as main; main()" "${@:2}"; }

timeout --signal=TERM "$seconds" "${PYTHON:-python3}" -c "from flowrl.cli import train as main; main()" \
  --policy "$policy" --out "$out/run" --envs "$envs" --iterations 1000 --val-episodes 256 --val-every 10 \
  --save-every 1000 "${@:3}" || [ $? -eq 124 ]
run evaluate --policy "$out/run/last" --versus "$policy" --fast --expert-fp32 --episodes "$episodes" --seed 9300003 \
  --workers "$envs" --out "$out/eval"
cat "$out/eval/versus.json"
