# syntax=docker/dockerfile:1
# The planner as a container, as a user without rights:
#
#   docker build -t fleetplan .
#   docker run --rm -v "$PWD:/data" -u "$(id -u):$(id -g)" fleetplan --slo slo.yaml -o out/
#
# and `plan serve`, the router of a plan before workers that run already:
#
#   docker build --target router -t fleetplan-router .
#   docker run -p 8000:8000 -v "$PWD/out:/data:ro" -e FLEETPLAN_API_KEYS=... fleetplan-router \
#     /data/plan.yaml --workers POOL=http://worker-1:8001,...
#
# Pin the base for your registry: docker build --build-arg PYTHON_DIGEST=@sha256:... (docker buildx imagetools
# inspect python:3.12-slim-bookworm prints it).
ARG PYTHON_TAG=3.12-slim-bookworm
ARG PYTHON_DIGEST=

FROM python:${PYTHON_TAG}${PYTHON_DIGEST} AS build
WORKDIR /src
RUN python -m venv /opt/fleetplan
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY fleetplan fleetplan
COPY planner planner
COPY profiling profiling
COPY ui ui
COPY catalogs catalogs
COPY schemas schemas
COPY examples examples
RUN /opt/fleetplan/bin/pip install --no-cache-dir --constraint constraints.txt ".[runtime]"

FROM python:${PYTHON_TAG}${PYTHON_DIGEST} AS base
# compiled code of the simulator and other caches go to XDG_CACHE_HOME: mount a volume there to keep them
ENV PATH=/opt/fleetplan/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache
RUN groupadd --gid 10001 fleetplan && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp fleetplan
COPY --from=build /opt/fleetplan /opt/fleetplan
USER 10001:10001
WORKDIR /data

FROM base AS router
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["plan", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/data/plan.yaml"]

FROM base AS plan
ENTRYPOINT ["plan"]
CMD ["--help"]
