# The server in a container that does not run as root. docs/guides/docker.md says how to use it.
#   docker build -t culet .
#   docker build -t culet:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY culet culet
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# Triton compiles a small C file for each kernel that it launches.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://pypi.org/simple
# torch changes rarely and takes most of the image, so it has a layer of its own.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.11"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
RUN useradd --create-home --uid 1000 culet \
    && install -d -o culet /cache
USER 1000
WORKDIR /home/culet
# Downloaded models and compiled kernels. Mount a volume here to keep them.
ENV HF_HOME=/cache/huggingface CULET_CACHE_DIR=/cache/culet
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import http.client; c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["culet", "serve", "--host", "0.0.0.0"]
CMD ["built-in"]
