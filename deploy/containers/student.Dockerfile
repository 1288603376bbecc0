# A student job. Without a command it shows the verbs.
#
#   docker build -f deploy/containers/student.Dockerfile -t opd-student:0.1.0 .
#   docker run --gpus all --read-only --tmpfs /tmp:exec -v runs:/runs -v models:/models -v $PWD/recipe.yaml:/recipe.yaml:ro \
#       opd-student:0.1.0 train /recipe.yaml run=/runs/first
#
# exec: Docker's tmpfs lets no library be loaded from it otherwise, such as the launchers that Triton compiles there.
# Models of the hub are fetched to /tmp, which is memory here; `-e HF_HOME=/hub -v hub:/hub` keeps them on a disk.
# Pin PYTHON by digest (python:3.12-slim-bookworm@sha256:...) where images must be reproducible.
ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS build
# Extras of pyproject.toml that students use, with commas; otel exports traces.
ARG EXTRAS=otel
# Another index for pip: https://download.pytorch.org/whl/cpu has torch without CUDA.
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY opd ./opd
COPY teacher_server ./teacher_server
COPY student ./student
# For `opd recipes`.
COPY examples/recipes ./examples/recipes
RUN python -m venv /opt/opd && /opt/opd/bin/pip install ".[$EXTRAS]"

FROM ${PYTHON}
# Triton compiles small launchers when a kernel first runs. New volumes at /hub and /runs take the owner of the folder here.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin opd \
    && install -d -o opd -g opd /hub \
    && install -d -o opd -g opd /runs
COPY --from=build /opt/opd /opt/opd
ENV PATH=/opt/opd/bin:$PATH HOME=/tmp HF_HOME=/tmp/huggingface TRITON_CACHE_DIR=/tmp/triton \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 9401
# SIGTERM saves a checkpoint; give it time: docker stop --time 600.
STOPSIGNAL SIGTERM
ENTRYPOINT ["opd"]
CMD ["--help"]
