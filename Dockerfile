# QSF in a container. `docker build -t qsf .` makes Debian with Python and the wheel; `docker build
# --target program -t qsf .` an image with the program without Python and nothing else (platforms.md).
# Both build from this tree.
#
#   docker run --rm -it -v "$PWD/models:/models" -v qsf:/cache qsf run model.gguf "Who are you?"
#
# The volume at /cache keeps what was downloaded and converted for the next container.
# The memory limit of a container is a ceiling that QSF heeds: docker run --memory 300m ...
FROM debian:bookworm-slim AS build
RUN apt-get update -q && apt-get install -y -q --no-install-recommends \
        ca-certificates gcc libc6-dev make pkg-config liblz4-dev libzstd-dev \
        python3 python3-venv
WORKDIR /src
COPY . .

FROM build AS build-program
RUN make program PROGRAM_TARGETS="$(uname -m)-linux-musl" && mkdir /root-of-image && \
    cp -r LICENSE licenses build/*-linux-musl/program/qsf /root-of-image

FROM scratch AS program
COPY --from=build-program /root-of-image/ /
USER 65534
WORKDIR /models
ENTRYPOINT ["/qsf"]

FROM build AS build-wheel
RUN machine=$(uname -m) && make wheels SYSTEMS=manylinux_2_17_$machine=$machine-linux-gnu.2.17

FROM debian:bookworm-slim
RUN apt-get update -q && apt-get install -y -q --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/qsf
COPY --from=build-wheel /src/dist/ /tmp/dist/
RUN /opt/qsf/bin/pip install --no-cache-dir /tmp/dist/qsf-*.whl && rm -r /tmp/dist
RUN useradd --create-home user && install -d -o user -g user /cache
USER user
ENV PATH=/opt/qsf/bin:$PATH XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
WORKDIR /models
EXPOSE 8080
# Of `serve`, by the shell alone: a second Python would take 10 MB of the container's memory.
HEALTHCHECK CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080 && \
printf 'GET /health HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '^HTTP/1.1 200' <&3"]
ENTRYPOINT ["python", "-m", "qsf"]
