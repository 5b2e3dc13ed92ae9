#!/usr/bin/env bash
# Does it run on this machine? Its kernels against their definitions, both attention back-ends, CUDA graphs on and off, one rank and all
# (two that share the GPU, where there is one), a save, a kill, a
# resume and an export: PASS or FAIL, and smoke.json to attach to a bug report. Two minutes on CPUs; meant to take five on GPUs.
#
#   bash launch/smoke.sh                                                         random weights, made here
#   bash launch/smoke.sh --model Qwen/Qwen2.5-VL-3B-Instruct --data rows.jsonl --reward exact --advantage grpo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flags=("$@")
set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
source launch/setup.sh
python launch/smoke.py ${flags[@]+"${flags[@]}"}
