# Builds an image with the command line. The GPU's driver comes from the host (NVIDIA Container Toolkit):
#
#     docker build --tag megacompile .
#     docker run --rm --gpus all --ulimit memlock=-1 megacompile doctor
#     docker run --rm --gpus all --ulimit memlock=-1 --volume "$PWD":/work megacompile train MODEL --data rows.jsonl --output runs/one
#
# --ulimit memlock=-1 allows pinned memory. Wheels of torch and CuPy bring CUDA's libraries; g++ compiles the update of weights.
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /src/
COPY megacompile /src/megacompile
COPY passes /src/passes
COPY runtime /src/runtime
RUN pip install --no-cache-dir "/src[cuda,train,hybrid,export]"
WORKDIR /work
ENTRYPOINT ["megacompile"]
CMD ["doctor"]
