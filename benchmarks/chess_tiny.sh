#!/usr/bin/env bash
# Makes models/chess-tiny from nothing: vision from many good episodes, the action expert from few sloppy ones.
#   usage: benchmarks/chess_tiny.sh OUT [CORES]        (one GPU; about 8 minutes on an H200 with 16 cores)
# What is there already is kept: the same command goes on where a time limit ended it.
# Each line of VARIANTS is a candidate: name, scenes, aim error [mm], hesitation [frames], closing shift [frames], steps.
set -euo pipefail
out=${1:?usage: chess_tiny.sh OUT [CORES]}
cores=${2:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)} # nproc obeys OMP_NUM_THREADS
variants=${VARIANTS:-"chess-tiny 400 3 8 2 2500"}
vision=${VISION:-$out/vision}
run() { "${PYTHON:-python3}" -c "import sys; from ${1%:*} import ${1#*:} as main; main()" "${@:2}"; }

if [ ! -d "$vision" ]; then
  run chess_apps.cli:bc --out "$vision" --record.episodes "${GOOD_EPISODES:-6000}" --record.workers "$cores" \
    --steps "${GOOD_STEPS:-10000}" --batch "${BATCH:-256}" --lr 1e-3
  [ "${EVAL_VISION:-1}" = 0 ] || run flowrl.cli:evaluate --policy "$vision" --fast --episodes "${EVAL_EPISODES:-300}" --seed 9300003 \
    --workers $((3 * cores)) --out "$out/eval/vision"
fi
while read -r name episodes aim hesitation shift steps; do
  [ -d "$out/$name" ] || run chess_apps.cli:bc --policy "$vision" --train expert --reset-expert --out "$out/$name" \
    --record.episodes "$episodes" --record.first-index 100000 --record.workers "$cores" \
    --record.aim-error-mm "$aim" --record.hesitation-frames "$hesitation" --record.close-shift-frames "$shift" \
    --stride 2 --steps "$steps" --batch "${BATCH:-256}" --lr 1e-3 --preset apps/presets/chess-tiny.json
  run flowrl.cli:evaluate --policy "$out/$name" --fast --episodes "${EVAL_EPISODES:-300}" --seed 9300003 \
    --workers $((3 * cores)) --out "$out/eval/$name"
done <<<"$variants"
