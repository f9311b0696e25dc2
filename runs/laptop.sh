#!/usr/bin/env bash
# The whole pipeline on a laptop, without a download: a few minutes on two cores.
# Every step can be interrupted and run again.
set -euo pipefail
cd "$(dirname "$0")/.."

# 1. a small corpus with noise, its clean half, and two unlike tokenizers
python runs/laptop_data.py out/laptop

# 2. a teacher: trained on clean text with a vocabulary of its own
vocagnolm prepare laptop-teacher
vocagnolm train laptop-teacher

# 3. the teacher reads the corpus once and leaves a store of its losses and likeliest tokens
vocagnolm score --teacher out/laptop/teacher/model --corpus out/laptop/corpus.jsonl \
    --out out/laptop/store --alternatives 4

# 4. student tokens with the teacher's targets
vocagnolm prepare laptop

# 5. distilled, guided, and plain pretraining for comparison: the same blocks, one word changed
vocagnolm check laptop
vocagnolm train laptop
for method in guided cpt; do
    vocagnolm train laptop --set "objective.method=$method" --set "run.folder=out/laptop/$method"
done

# 6. bits per byte on clean text that none of them has seen
for run in distilled guided cpt; do
    vocagnolm evaluate "out/laptop/$run/model" --text out/laptop/held-out.txt
done
