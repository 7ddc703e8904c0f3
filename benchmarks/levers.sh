#!/usr/bin/env bash
# Several RL runs side by side from one policy, each with its share of the cores, and their comparison with the start on
# validation scenes: the last checkpoint, and the mean of the last ten.
#   usage: LEVERS=$'name GPU FIRST_CORE-LAST_CORE [flowrl-train flags ...]\n...' benchmarks/levers.sh OUT SECONDS [TOTAL]
# Training stops after SECONDS. Evaluations that are not finished after TOTAL seconds (default 585) are given up, so that the table comes.
set -euo pipefail
out=${1:?usage: levers.sh OUT SECONDS}
seconds=${2:?usage: levers.sh OUT SECONDS}
total=${3:-585}
policy=${POLICY:-models/chess-tiny}
episodes=${EVAL_EPISODES:-512}
here=$(dirname "$0")
evaluate() { # until TOTAL; SECONDS counts from the start of this script
  local left=$((total - SECONDS))
  [ "$left" -gt 0 ] && timeout "$left" "${PYTHON:-python3}" -c "from flowrl.cli import evaluate as main; main()" "$@"
}

lever() { # name GPU cores flags...
  local name=$1 gpu=$2 cores=$3 kwargs='{}' i
  for ((i = 4; i < $#; i++)); do
    [ "${!i}" != --env-kwargs ] || { local j=$((i + 1)); kwargs=${!j}; }
  done
  export CUDA_VISIBLE_DEVICES=$gpu MUJOCO_EGL_DEVICE_ID=$gpu
  taskset -pc "$cores" $BASHPID >"$out/$name.log"
  timeout --kill-after=30 --signal=TERM "$seconds" "${PYTHON:-python3}" -c "from flowrl.cli import train as main; main()" --policy "$policy" \
    --out "$out/$name" --envs "${ENVS:-48}" --iterations 1000 --val-episodes "${VAL_EPISODES:-16}" --val-every 1000 --save-every 4 \
    "${@:4}" >>"$out/$name.log" 2>&1 || [ $? -eq 124 ]
  mapfile -t saved < <(find "$out/$name" -maxdepth 1 -name 'iter_*' | sort | tail -10)
  "${PYTHON:-python3}" "$here/average_checkpoints.py" "$out/$name-mean" "${saved[@]}" >>"$out/$name.log"
  local policies=("$out/$name/last" "$out/$name-mean") # the start first, where it is this run's to measure: a time limit cuts the end
  case "$*" in *n_action_steps*) policies=("$policy" "${policies[@]}") ;; *) [ "$name" != "${first:-}" ] || policies=("$policy" "${policies[@]}") ;; esac
  for which in "${policies[@]}"; do
    evaluate --policy "$which" --fast --expert-fp32 --episodes "$episodes" --seed 9300003 --workers "${ENVS:-48}" \
      --env-kwargs "$kwargs" --out "$out/eval/$name/$(basename "$which")" >>"$out/$name.log" 2>&1
  done
}

mkdir -p "$out"
pids=()
names=()
read -r first _ <<<"$LEVERS"
while read -r -a words; do
  [ ${#words[@]} -eq 0 ] || { lever "${words[@]}" & pids+=($!); names+=("${words[0]}"); }
done <<<"$LEVERS"
failed=()
for ((i = 0; i < ${#pids[@]}; i++)); do wait "${pids[$i]}" || failed+=("${names[$i]}"); done
"${PYTHON:-python3}" "$here/lever_table.py" "$out" || echo "no table"
for name in ${failed[@]+"${failed[@]}"}; do echo "$name FAILED or ran out of time: $(tail -n 1 "$out/$name.log")"; done
[ ${#failed[@]} -eq 0 ]
