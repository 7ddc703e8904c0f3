#!/usr/bin/env bash
# Memory of a running program every 20 s: seconds, resident set of the process, proportional set of it and its children.
#   usage: benchmarks/memory.sh PID [INTERVAL]     (Linux; ends with the program)
set -u
pid=${1:?usage: memory.sh PID [INTERVAL]}
interval=${2:-20}
began=$(date +%s)
echo "seconds rss_mb tree_pss_mb"
while kill -0 "$pid" 2>/dev/null; do
  tree="$pid $(pgrep -P "$pid")"
  for child in $(pgrep -P "$pid"); do tree="$tree $(pgrep -P "$child")"; done
  rss=$(awk '/^Rss:/ {print int($2 / 1024)}' "/proc/$pid/smaps_rollup" 2>/dev/null)
  pss=0
  for process in $tree; do
    part=$(awk '/^Pss:/ {print $2}' "/proc/$process/smaps_rollup" 2>/dev/null)
    pss=$((pss + ${part:-0}))
  done
  echo "$(($(date +%s) - began)) ${rss:-0} $((pss / 1024))"
  sleep "$interval"
done
