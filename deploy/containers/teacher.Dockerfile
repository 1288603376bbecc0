# A teacher server. ENGINE is transformers, vllm or sglang.
#
#   docker build -f deploy/containers/teacher.Dockerfile --build-arg ENGINE=vllm -t opd-teacher:vllm .
#   docker run --gpus all --read-only --tmpfs /tmp:exec -v models:/models -p 7070:7070 opd-teacher:vllm \
#       --model teacher=/models/teacher --host 0.0.0.0 --allow-insecure
#
# exec: Docker's tmpfs lets no library be loaded from it otherwise, such as the launchers that Triton compiles there.
# Models of the hub are fetched to /tmp, which is memory here; `-e HF_HOME=/hub -v hub:/hub` keeps them on a disk.
# Pin PYTHON by digest (python:3.12-slim-bookworm@sha256:...) where images must be reproducible.
ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS build
ARG ENGINE=transformers
# One package more, such as ray for a teacher over several nodes: vLLM does not bring it.
ARG PACKAGE=
# Another index for pip: https://download.pytorch.org/whl/cpu has torch without CUDA.
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A compiler for the one dependency that comes as source; it stays behind in this stage.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY opd ./opd
COPY teacher_server ./teacher_server
COPY student ./student
RUN python -m venv /opt/opd \
    && if [ "$ENGINE" = transformers ]; then extra=gpu,otel; else extra="$ENGINE,otel"; fi \
    && /opt/opd/bin/pip install ".[$extra]" ${PACKAGE:+"$PACKAGE"}

FROM ${PYTHON}
ARG ENGINE=transformers
# vLLM, SGLang and Triton compile small launchers when they first run.
RUN if [ "$ENGINE" != transformers ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin opd \
    && install -d -o opd -g opd /hub
COPY --from=build /opt/opd /opt/opd
# The root file system may be read-only: everything that is written goes to /tmp.
ENV PATH=/opt/opd/bin:$PATH HOME=/tmp HF_HOME=/tmp/huggingface TRITON_CACHE_DIR=/tmp/triton \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OPD_ENGINE=$ENGINE
USER 10001:10001
EXPOSE 7070 9400
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9400/healthz', timeout=4)"]
ENTRYPOINT ["/bin/sh", "-c", "exec opd serve --engine \"$OPD_ENGINE\" --port 7070 --metrics-port 9400 --metrics-host 0.0.0.0 \"$@\"", "opd-serve"]
