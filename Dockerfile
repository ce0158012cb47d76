# Meshbook with its environment, for GPUs or CPUs:
#
#   docker build -t ghcr.io/team/meshbook:1.0 .
#   docker build -t meshbook:cpu --build-arg TORCH=cpu .
#   docker run --rm meshbook:cpu python recipes/finetune.py experiment=smoke
#
# docs/kubernetes.md and slurm/README.md use it on clusters. CUDA comes with PyTorch's packages and the driver from the
# host, so a base image with CUDA would only add a second copy. Debian 12 has Python 3.11, with which the tests run.
ARG BASE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
FROM ${BASE}

# Triton and torch.compile need the compilers and Python's headers when a kernel is first used; NCCL reaches InfiniBand
# through libibverbs. Debian's packages are not pinned, since a mirror only keeps the newest, with its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ ibverbs-providers libibverbs1 python3.11-dev \
        python3.11-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home meshbook

# TORCH: cuda or cpu. EXTRAS: of pyproject.toml, such as plot,wandb,liger. Before the code, so that a change of the code
# does not install the packages again; the editable installation finds the code that is copied later.
ARG TORCH=cuda
ARG EXTRAS=plot
WORKDIR /meshbook
COPY constraints.txt pyproject.toml setup.py ./
COPY scripts/install.sh scripts/
RUN --mount=type=cache,target=/root/.cache/pip \
    VENV=/opt/venv PYTHON=python3.11 scripts/install.sh

# Readable whatever the umask of the checkout, and compiled, since only root can write bytecode here. Runs go to outputs,
# unless run.dir names another folder.
COPY . .
RUN chmod -R a+rX . \
    && mkdir -m 1777 outputs \
    && /opt/venv/bin/python -m compileall -q components meshbook recipes scripts

# pyxis lets a variable of the image override that of the job, so none that a job or its user sets may be here: no HOME,
# HF_HOME, PYTHONPATH or OMP_NUM_THREADS. enroot gives a container GPUs and CUDA's driver only with the NVIDIA variables.
ENV PATH=/opt/venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, by which Kubernetes verifies runAsNonRoot. Any other user works as well.
USER 1000
# Pods replace it by their own command. Elsewhere it forwards SIGTERM to the launcher, and ends programs that do not
# handle SIGTERM, which as process 1 would ignore it.
ENTRYPOINT ["tini", "--"]
CMD ["meshbook"]
