#!/usr/bin/env bash
# Does it run on this machine? Checks kernels against their definitions, both attention back-ends, CUDA graphs on and off, one rank
# and all (two that share the GPU if there is one), a save, a kill, a resume and an export. Prints PASS or FAIL, and writes smoke.json,
# to attach to a bug report. Two minutes on CPUs, and on an H100.
#
#   bash launch/smoke.sh                                                         random weights, made here
#   bash launch/smoke.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data rows.jsonl --reward exact --advantage grpo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flags=("$@")
set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
source launch/setup.sh
python launch/smoke.py ${flags[@]+"${flags[@]}"}
