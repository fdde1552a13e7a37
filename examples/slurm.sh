#!/usr/bin/env bash
# The pipeline on a Slurm cluster: answers and features by a job array of PARTS jobs with one GPU each, then a head.
#
#   TARGET=Qwen/Qwen3-8B RUN=gs://my-bucket/qwen3-8b PROMPTS=prompts.jsonl PARTS=16 examples/slurm.sh
#
# Each job of an array makes one part; a short job joins the parts once all are there. A job that is killed, requeued
# or submitted again continues where it stopped, and what is complete is left alone, so the same command again is safe.
set -euo pipefail

: "${TARGET:?}" "${RUN:?}" "${PROMPTS:?}"
PARTS=${PARTS:-8}
after=() # the job that the next one waits for

submit() { # options of sbatch... -- command
    local options=()
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    local job
    job=$(sbatch --parsable --requeue --kill-on-invalid-dep=yes "${after[@]}" "${options[@]}" --wrap "${*:2}")
    after=(--dependency "afterok:$job")
}

in_parts() { # command
    submit --gres gpu:1 --array "0-$((PARTS - 1))" -- "$* --num-shards $PARTS --shard-index \$SLURM_ARRAY_TASK_ID"
    submit -- "$* --num-shards $PARTS"
}

in_parts eagle gen-data --target "$TARGET" --prompts "$PROMPTS" --output "$RUN/conversations" ${GEN_DATA_FLAGS:-}
in_parts eagle extract-features --target "$TARGET" --conversations "$RUN/conversations" --output "$RUN/features"
submit --gres gpu:1 -- eagle train --features "$RUN/features" --output "$RUN/head" ${TRAIN_FLAGS:-}
submit --gres gpu:1 -- eagle bench --target "$TARGET" --head "$RUN/head" --prompts builtin:eval --output "$RUN/bench"
