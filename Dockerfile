# Pinned environments of eyas. Bases come by digest from containers/pins.env, packages by hash from requirements/*.lock.
#   cpu   the default pipeline          ci    cpu with what `make check` and `make test` need
#   cuda  SGLang and training on a GPU (SM90, SM100, SM120)
# The repository is mounted, never copied: its own src/ runs. What is installed here serves where none is mounted.
ARG BASE_CPU
ARG BASE_CUDA

# ── cpu ───────────────────────────────────────────────────────────────────────────────────────
FROM ${BASE_CPU} AS system
ARG SOURCE_DATE_EPOCH=0
ENV LANG=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
# hadolint ignore=DL3008
RUN apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends git make procps tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/*.log /var/cache/ldconfig/aux-cache \
 && useradd --uid 1000 --create-home --shell /bin/bash eyas

FROM system AS cpu-packages
ARG SOURCE_DATE_EPOCH=0
ARG TORCH=torch==2.13.0
ARG TORCH_PIP_ARGS=""
RUN python3 -m venv /opt/eyas
COPY requirements/cpu.lock /tmp/cpu.lock
# setuptools first: it builds the one package that has no wheel.
# hadolint ignore=DL3013,DL3042
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,id=eyas-pip,target=/var/cache/pip \
    pip() { /opt/eyas/bin/python -m pip install -qq --cache-dir=/var/cache/pip "$@"; } \
 && awk '/^[a-z]/{on=/^setuptools==/} on' /tmp/cpu.lock > /tmp/setuptools.lock \
 && pip --require-hashes --no-deps -r /tmp/setuptools.lock \
 && pip --require-hashes --no-deps --use-pep517 --no-build-isolation -r /tmp/cpu.lock \
 && pip ${TORCH_PIP_ARGS} "${TORCH}" \
 && rm -rf /tmp/*

FROM system AS cpu
ARG SOURCE_DATE_EPOCH=0
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="eyas" \
      org.opencontainers.image.description="Capture hidden states and train an EAGLE-3 drafter: the pipeline on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# hadolint ignore=DL3064
ENV PATH=/opt/eyas/bin:$PATH DVC_NO_ANALYTICS=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
COPY --from=cpu-packages /opt/eyas /opt/eyas
COPY pyproject.toml README.md LICENSE /opt/eyas/source/
COPY src /opt/eyas/source/src
# hadolint ignore=DL3013,DL3042
RUN pip install -qq --no-cache-dir --no-index --no-deps --no-build-isolation /opt/eyas/source \
 && rm -rf /opt/eyas/source /tmp/*
USER 1000:1000
WORKDIR /workspace
HEALTHCHECK --interval=5m --timeout=60s CMD ["eyas", "doctor"]
ENTRYPOINT ["tini", "-g", "--"]
CMD ["bash"]

FROM cpu AS ci
ARG SOURCE_DATE_EPOCH=0
USER 0:0
COPY requirements/dev.lock /tmp/dev.lock
# hadolint ignore=DL3042
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,id=eyas-pip,target=/var/cache/pip \
    pip install -qq --cache-dir=/var/cache/pip --require-hashes --no-deps --use-pep517 --no-build-isolation -r /tmp/dev.lock \
 && rm -rf /tmp/*
USER 1000:1000

# ── cuda ──────────────────────────────────────────────────────────────────────────────────────
FROM ${BASE_CUDA} AS cuda-system
ARG SOURCE_DATE_EPOCH=0
ENV LANG=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 CUDA_HOME=/usr/local/cuda
# g++ and ninja: SGLang, flashinfer and Triton compile kernels when they first meet a shape.
# hadolint ignore=DL3008
RUN apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    ca-certificates g++ git make ninja-build numactl procps python3 python3-dev python3-venv tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/*.log /var/cache/ldconfig/aux-cache \
 && (id -u 1000 >/dev/null 2>&1 || useradd --uid 1000 --create-home --shell /bin/bash eyas)

FROM cuda-system AS cuda-packages
ARG SOURCE_DATE_EPOCH=0
RUN python3 -m venv /opt/eyas
COPY requirements/cuda.lock /tmp/cuda.lock
# hadolint ignore=DL3042
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,id=eyas-pip,target=/var/cache/pip \
    pip() { /opt/eyas/bin/python -m pip install -qq --cache-dir=/var/cache/pip --require-hashes --no-deps "$@"; } \
 && awk '/^[a-z]/{on=/^setuptools==/} on' /tmp/cuda.lock > /tmp/setuptools.lock \
 && pip -r /tmp/setuptools.lock \
 && pip --use-pep517 --no-build-isolation -r /tmp/cuda.lock \
 && rm -rf /tmp/*

FROM cuda-system AS cuda
ARG SOURCE_DATE_EPOCH=0
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="eyas-cuda" \
      org.opencontainers.image.description="Capture hidden states with SGLang and train an EAGLE-3 drafter on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# hadolint ignore=DL3064
ENV PATH=/opt/eyas/bin:/usr/local/cuda/bin:$PATH \
    DVC_NO_ANALYTICS=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
COPY --from=cuda-packages /opt/eyas /opt/eyas
COPY pyproject.toml README.md LICENSE /opt/eyas/source/
COPY src /opt/eyas/source/src
# hadolint ignore=DL3013,DL3042
RUN pip install -qq --no-cache-dir --no-index --no-deps --no-build-isolation /opt/eyas/source \
 && rm -rf /opt/eyas/source /tmp/*
USER 1000:1000
WORKDIR /workspace
HEALTHCHECK --interval=5m --timeout=60s CMD ["eyas", "doctor"]
ENTRYPOINT ["tini", "-g", "--"]
CMD ["bash"]
