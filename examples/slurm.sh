#!/usr/bin/env bash
# The pipeline on a Slurm cluster: answers and features by a job array of PARTS jobs with one GPU each, then a head.
# Run it on a login node with eagle's environment active (source .venv/bin/activate); the jobs inherit it.
#
#   TARGET=Qwen/Qwen3-8B RUN=gs://my-bucket/qwen3-8b PROMPTS='prompts.jsonl builtin:chat' PARTS=16 examples/slurm.sh
#
# GEN_DATA_FLAGS, EXTRACT_FEATURES_FLAGS, TRAIN_FLAGS, BENCH_FLAGS and EVAL_PROMPTS are those of make; SBATCH_PARTITION,
# SBATCH_ACCOUNT and SBATCH_TIMELIMIT are sbatch's own. Each job of an array makes one part; a short job joins the parts
# once all are there. A job that is preempted is queued again and continues behind its last shard or checkpoint. One that
# fails or runs out of time ends the chain; then the same command again continues, and leaves alone what is complete.
set -euo pipefail

: "${TARGET:?}" "${RUN:?}" "${PROMPTS:?}"
PARTS=${PARTS:-8}
after=() # the job that the next one waits for

submit() { # options of sbatch... -- command
    local options=()
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    local job
    job=$(sbatch --parsable --requeue --kill-on-invalid-dep=yes "${after[@]}" "${options[@]}" --wrap "exec $2")
    after=(--dependency "afterok:${job%%;*}")
}

in_parts() { # command
    submit --gres gpu:1 --array "0-$((PARTS - 1))" -- "$1 --num-shards $PARTS --shard-index \$SLURM_ARRAY_TASK_ID"
    submit -- "$1 --num-shards $PARTS"
}

stage() { # arguments... : a command for the job's shell, in which they are what they are here
    printf '%q ' eagle "$@"
}

prompts() { # sources, separated by spaces
    local source sources
    read -ra sources <<<"$1"
    for source in "${sources[@]}"; do printf '%q ' --prompts "$source"; done
}

in_parts "$(stage gen-data --target "$TARGET" --output "$RUN/conversations")$(prompts "$PROMPTS")${GEN_DATA_FLAGS:-}"
in_parts "$(stage extract-features --target "$TARGET" --conversations "$RUN/conversations" \
    --output "$RUN/features")${EXTRACT_FEATURES_FLAGS:-}"
submit --gres gpu:1 -- "$(stage train --features "$RUN/features" --output "$RUN/head")${TRAIN_FLAGS:-}"
submit --gres gpu:1 -- "$(stage bench --target "$TARGET" --head "$RUN/head" --output "$RUN/bench")$(
    prompts "${EVAL_PROMPTS:-builtin:eval}")${BENCH_FLAGS:-}"
