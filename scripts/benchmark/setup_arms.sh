#!/usr/bin/env bash
# Install the libraries that scripts/benchmark/compare.py compares with, each into an environment of its own.
#
#   scripts/benchmark/setup_arms.sh                    all of them: outputs/benchmark/arms/NAME
#   scripts/benchmark/setup_arms.sh torchtitan litgpt  some of them
#
# PYTHON=python3.12 selects the Python; ARMS=FOLDER another folder (compare.py finds the default one by itself). Needs only
# the package index. torch is the version that Meshbook's own environment has, unless TORCH names another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
ARMS=${ARMS:-outputs/benchmark/arms}
TORCH=${TORCH:-$("$PYTHON" -c 'import torch; print(torch.__version__.partition("+")[0])')}
declare -A packages=(
    [torchtune]="torchtune==0.6.1 torchao==0.10.0 sentencepiece tiktoken"
    [litgpt]="litgpt==0.5.13 lightning"
    [torchtitan]="torchtitan==0.3.0 triton"
    [automodel]="nemo_automodel==0.7.0"
)

fail() {
    echo "setup_arms.sh: $1" >&2
    exit 2
}

[ $# -gt 0 ] || set -- "${!packages[@]}"
for arm in "$@"; do
    [ -n "${packages[$arm]:-}" ] || fail "$arm: must be one of ${!packages[*]}"
done
for arm in "$@"; do
    echo "$ARMS/$arm: torch $TORCH, ${packages[$arm]}"
    "$PYTHON" -m venv "$ARMS/$arm"
    # shellcheck disable=SC2086 # a list of requirements
    "$ARMS/$arm/bin/python" -m pip install -q "torch==$TORCH" numpy safetensors ${packages[$arm]}
done
