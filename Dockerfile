# A server for CPUs; for GPUs, build on an image that has CUDA and torch:
#   docker build --build-arg BASE=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime -t selfmask:gpu .
ARG BASE=python:3.12-slim
FROM ${BASE}
WORKDIR /app
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN pip install --no-cache-dir ".[serve]" && useradd --create-home selfmask
USER selfmask
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["selfmask", "serve", "--host", "0.0.0.0", "--masks", "/masks"]
CMD ["--backbone", "selfmask/tiny", "--api-key-file", "/run/secrets/api_keys"]
