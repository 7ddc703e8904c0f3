#!/usr/bin/env bash
# The proof, in stages that can be run one after another on different days (each continues what OUT holds):
#   benchmarks/gain.sh train SECONDS      three RL runs (seeds 1, 2, 3) side by side, stopped after SECONDS as by Ctrl-C; again: goes on
#   benchmarks/gain.sh control            critic-only run, filtered cloning, longer cloning (with as many demonstrations, and with more)
#   benchmarks/gain.sh test               test scenes 0-999 (seed 9000003), each model in OUT/final against the start
# Environment: OUT (default runs/gain), POLICY (models/chess-tiny), GPUS (all), ITERATIONS (150), ENVS (of a run, 48), PYTHON, VAL_EPISODES (256), FLAGS (further flags of flowrl-train).
set -euo pipefail
stage=${1:?usage: gain.sh train SECONDS | control | test}
out=${OUT:-runs/gain}
policy=${POLICY:-models/chess-tiny}
iterations=${ITERATIONS:-150}
envs=${ENVS:-48}
test_episodes=${TEST_EPISODES:-1000}
python=${PYTHON:-python3}
read -r -a gpus <<<"${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')}"
[ ${#gpus[@]} -gt 0 ] || gpus=(0)
cores=$(nproc --all) # not nproc alone: it obeys OMP_NUM_THREADS
mkdir -p "$out/final"
program() { "$python" -c "import sys; from flowrl.cli import $1 as main; main()" "${@:2}"; }
job() { # number of jobs, own number, command...: on its share of the cores and its GPU
  local jobs=$1 own=$2 share=$((cores / $1))
  [ "$share" -gt 0 ] || share=1
  local first=$((own * share % cores))
  export CUDA_VISIBLE_DEVICES=${gpus[$((own % ${#gpus[@]}))]}
  export MUJOCO_EGL_DEVICE_ID=$CUDA_VISIBLE_DEVICES
  taskset -pc "$first-$((first + share - 1))" $BASHPID >/dev/null
  "${@:3}"
}
run_seed() { # seed: training scenes and torch's generator differ
  local flags=(--policy "$policy" --out "$out/seed$1" --train-seed "$((7700003 + $1))" --envs "$envs" --iterations "$iterations"
    --val-episodes "${VAL_EPISODES:-256}" --val-every 20 --save-every 20 ${FLAGS:-})
  [ ! -e "$out/seed$1/args.json" ] || flags=(--out "$out/seed$1" --resume)
  timeout --signal=TERM "$seconds" "$python" -c "from flowrl.cli import train as main; main()" "${flags[@]}" \
    >>"$out/seed$1.log" 2>&1 || [ $? -eq 124 ]
  rm -rf "$out/final/rl-seed$1"
  cp -r "$out/seed$1/last" "$out/final/rl-seed$1" # the last checkpoint, declared beforehand
}

case $stage in
train)
  seconds=${2:?usage: gain.sh train SECONDS}
  for seed in 1 2 3; do job 3 $((seed - 1)) run_seed "$seed" & done
  wait
  ;;
control)
  critic() {
    program train --policy "$policy" --out "$out/critic-only" --train-seed 7700004 --envs "$envs" --iterations 8 --critic-warmup 8 \
      --val-every 100 --val-episodes 8 --save-every 100 >>"$out/critic-only.log" 2>&1
    cp -r "$out/critic-only/last" "$out/final/critic-only"
  }
  filtered() {
    "$python" apps/baselines/filtered_cloning.py --policy "$policy" --out "$out/final/filtered" --train-seed 7700004 --envs "$envs" \
      --episodes "${FILTERED_EPISODES:-$((256 * iterations))}" --steps "${FILTERED_STEPS:-4000}" --collect-at-once 1024 >>"$out/filtered.log" 2>&1
  }
  longer() { # name, scenes: the demonstrations of the start's expert (benchmarks/chess_tiny.sh), or as many more
    "$python" -c "from chess_apps.cli import bc as main; main()" --policy "$policy" --train expert --out "$out/final/$1" \
      --record.episodes "$2" --record.first-index 100000 --record.workers "$((cores / 4))" --record.aim-error-mm 3 \
      --record.hesitation-frames 8 --record.close-shift-frames 2 --stride 2 --steps "${LONGER_STEPS:-5000}" --batch 256 --lr 5e-4 >>"$out/$1.log" 2>&1
  }
  job 4 0 filtered &
  job 4 1 critic &
  job 4 2 longer longer 400 &
  job 4 3 longer longer-twice 800 &
  wait
  ;;
test)
  models=("$out"/final/*)
  evaluate() {
    program evaluate --policy "$1" --versus "$policy" --fast --expert-fp32 --seed 9000003 --episodes "$test_episodes" --workers "$envs" \
      --out "$out/test/$(basename "$1")" >>"$out/test-$(basename "$1").log" 2>&1
  }
  for ((i = 0; i < ${#models[@]}; i++)); do
    job ${#models[@]} "$i" evaluate "${models[$i]}" &
  done
  wait
  for model in "${models[@]}"; do
    echo "$(basename "$model") $(tr -d '\n ' <"$out/test/$(basename "$model")/versus.json")"
  done
  ;;
*)
  echo "unknown stage $stage: train SECONDS, control or test" >&2
  exit 2
  ;;
esac
