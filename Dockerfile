# llmc in a container, from the wheel: the ops are compiled here, so that nothing is at start-up.
#   docker build -t llmc .                      docker run -p 8000:8000 llmc serve --host 0.0.0.0
#   docker build --target cuda -t llmc:cuda .   docker run --gpus all -p 8000:8000 llmc:cuda ...
#   docker build --target ray -t llmc:ray .     nodes of a Ray cluster (docs/ray.md)

FROM python:3.12-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir "build>=1.2" \
    && python -m build --wheel --outdir /dist

FROM python:3.12-slim-bookworm AS base
RUN useradd --create-home --uid 1000 llmc
COPY --from=wheel /dist /dist
WORKDIR /home/llmc
EXPOSE 8000
ENTRYPOINT ["llmc"]
CMD ["serve", "--host", "0.0.0.0"]

# torch's own wheels bring CUDA; Triton compiles its launchers with a C compiler
FROM base AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir /dist/*.whl
USER 1000

# with Ray in the place of a server; KubeRay's probes ask with wget
FROM cuda AS ray
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "ray[serve,data]==2.60.0"
ENTRYPOINT []
CMD ["ray", "--help"]
USER 1000

FROM base AS cpu
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$TORCH" --index-url "$TORCH_INDEX" \
    && pip install --no-cache-dir /dist/*.whl
USER 1000
