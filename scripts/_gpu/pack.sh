#!/usr/bin/env bash
# Make a folder of 16 MB to take to a machine that has a GPU and torch, but no package index (make gpu-pack): the wheels
# that such a machine usually lacks, and run.sh, which runs scripts/gpu.py with them.
#
#   scripts/_gpu/pack.sh [FOLDER]      FOLDER: outputs/gpu_pack; PYTHON_VERSION=3.12 is the Python of that machine
#   bash FOLDER/run.sh [OPTIONS]       there, in the root of the checkout; results: $OUT, or outputs/gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-outputs/gpu_pack}
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
packages=(transformers hydra-core omegaconf peft gguf regex)
mkdir -p "$folder"
if [ -n "$(ls -A "$folder")" ] && ! grep -qs meshbook_gpu_packages "$folder/run.sh"; then
    printf '%s: is not empty and was not made by this script; give a new folder\n' "$folder" >&2
    exit 2
fi
for each in "${packages[@]}" antlr4-python3-runtime; do rm -f "$folder/${each//-/_}"-*.whl; done
platforms=()
for each in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${each}_x86_64")
done
pinned() { grep -iE "^($(IFS='|' && echo "$*"))==" constraints.txt; }
mapfile -t wanted < <(pinned "${packages[@]}")
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d "$folder" "${wanted[@]}"
# hydra-core and omegaconf need a version of antlr that is published as source only.
mapfile -t sources < <(pinned antlr4-python3-runtime)
"$python" -m pip wheel -q --no-deps -w "$folder" "${sources[@]}"

cat >"$folder/run.sh" <<'RUN'
#!/usr/bin/env bash
# In the root of the checkout, on a machine with a GPU and torch: install the wheels beside this file into a temporary
# folder, once, and run scripts/gpu.py with these options. Results: $OUT, or outputs/gpu.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=${TMPDIR:-/tmp}/meshbook_gpu_packages
if [ ! -e "$packages/complete" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$packages" "$here"/*.whl
    touch "$packages/complete"
fi
# A virtual machine may have no /dev/nvidia0, by which GPUs are counted.
! command -v nvidia-smi >/dev/null || export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
export PYTHONPATH="$packages:$PWD" HF_HUB_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false
exec python3 scripts/gpu.py --out "${OUT:-outputs/gpu}" "$@"
RUN
du -sh "$folder"
