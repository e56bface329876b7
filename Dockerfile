# syntax=docker/dockerfile:1.7
# Two images. What is in them is pinned: Debian by its digest, Python packages by requirements/, Apex by its commit.
#   docker build --target cpu -t megatron_rl:cpu .     # bash launch/test.sh passes in it
#   docker build --target gpu -t megatron_rl:gpu .     # Hopper, CUDA 13; building needs no GPU and about 45 GB of disk
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -it megatron_rl:gpu megatron-rl doctor
# Everything of CUDA but the driver comes from the wheels of requirements/gpu.lock, nvcc included. So do Transformer Engine's
# kernels, which have nothing of PyTorch in them; its extension for PyTorch and Apex's are compiled here, for the torch of the lock.
ARG DEBIAN=debian:12.11-slim@sha256:b1a741487078b369e78119849663d7f1a5341ef2768798f7b7406c4240f86aef

# What both images need while they run. Triton and SGLang compile kernels then, with gcc, g++ and the headers of Python.
FROM ${DEBIAN} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8 PYTHONUNBUFFERED=1
# Without versions: Debian 12 changes a package for its security fixes alone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap build-essential ca-certificates libnuma1 libseccomp2 procps python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash trainer \
    && install -d -o trainer -g trainer /workspace
WORKDIR /workspace

# GPUs get Megatron Core 0.19, which needs Python 3.12; Debian 12 has 3.11. uv checks what it fetches against digests of its own.
FROM base AS python
ENV UV_PYTHON_INSTALL_DIR=/opt/python
COPY requirements/uv.txt requirements/uv.txt
RUN python3.11 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir -r requirements/uv.txt \
    && /opt/uv/bin/uv python install 3.12.12

# The files that decide what is installed, and no others: a change elsewhere leaves the packages' layers as they are.
FROM base AS pins
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY launch/setup.sh launch/te_python.sh launch/pip_settings.py launch/torchvision_without_cuda.pth launch/
COPY megatron_rl/__init__.py megatron_rl/
COPY megatron_rl/cpu/__init__.py megatron_rl/cpu/import_hook.py megatron_rl/cpu/
COPY megatron_rl/system/gpu/gpu_stack.py megatron_rl/system/gpu/
ENV VENV=/opt/venv PIP_NO_CACHE_DIR=1

FROM pins AS cpu-packages
# PyTorch's builds without CUDA are in an index of their own; plain PyPI has those with it, which are gigabytes.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN PIP_EXTRA_INDEX_URL=${TORCH_CPU_INDEX} FLAVOR=cpu bash launch/setup.sh

FROM base AS cpu
COPY --from=cpu-packages /opt/venv /opt/venv
COPY --chown=trainer:trainer . .
RUN ln -s /opt/venv .venv
ENV PATH=/opt/venv/bin:$PATH FLAVOR=cpu
USER 1000
CMD ["bash"]

FROM pins AS gpu-packages
# Cores that compile Transformer Engine; each takes up to 3 GiB. Unset: as many as memory allows.
ARG MAX_JOBS
COPY --from=python /opt/python /opt/python
RUN UV_PYTHON_INSTALL_DIR=/opt/python PYTHON=3.12 FLAVOR=gpu bash launch/setup.sh
# Apex for Hopper: the one extension that Megatron Core takes from it.
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ADD https://github.com/NVIDIA/apex.git#${APEX_COMMIT} /src/apex
COPY launch/build_apex.py launch/build_apex.py
RUN CUDA_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cu13 TORCH_CUDA_ARCH_LIST=9.0 \
        /opt/venv/bin/python launch/build_apex.py /src/apex /src/wheels \
    && /opt/venv/bin/pip install --no-deps /src/wheels/*.whl
# In parts of a few GB, so that a new version of one package does not send all of them again.
RUN parts=/opt/venv/lib/python3.12/site-packages \
    && for part in nvidia torch triton sgl_kernel; do \
        mkdir -p "/layers/$part" && mv "$parts/$part" "/layers/$part/$part"; \
    done

FROM base AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=python /opt/python /opt/python
COPY --from=gpu-packages /layers/nvidia /opt/venv/lib/python3.12/site-packages
COPY --from=gpu-packages /layers/torch /opt/venv/lib/python3.12/site-packages
COPY --from=gpu-packages /layers/triton /opt/venv/lib/python3.12/site-packages
COPY --from=gpu-packages /layers/sgl_kernel /opt/venv/lib/python3.12/site-packages
COPY --from=gpu-packages /opt/venv /opt/venv
COPY --chown=trainer:trainer . .
RUN ln -s /opt/venv .venv
# Defaults, which "docker run --env" changes. The trainer sets NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE for itself and its servers.
ENV PATH=/opt/venv/bin:$PATH FLAVOR=gpu \
    CUDA_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cu13 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    MEGATRON_RL_REQUIRE_GPU=1
USER 1000
CMD ["bash"]
