# A GPU host in a container: CUDA 13 with its compiler, CPython 3.12, the locked packages.
#   docker build -t selfplay .
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/work/runs" selfplay \
#       selfplay-train --config qwen2.5_0.5b
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive CUDA_HOME=/usr/local/cuda PATH=/opt/venv/bin:$PATH
# g++ and Python.h: Triton and flashinfer compile kernels at their first use. bubblewrap: the sandbox
# of graded code.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        python3.12 python3.12-dev python3.12-venv g++ ninja-build libnuma1 bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
COPY requirements/gpu.lock /opt/
RUN python -m pip install --no-cache-dir -r /opt/requirements/gpu.lock
COPY . /opt/selfplay
RUN python -m pip install --no-cache-dir --no-deps /opt/selfplay
WORKDIR /work
CMD ["selfplay-train", "--help"]
