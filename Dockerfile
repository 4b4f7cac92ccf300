# QSF in a container. The first stage builds the wheel from this tree, with all that takes; the
# second holds Python and the wheel only.
#
#   docker build -t qsf .
#   docker run --rm -it -v "$PWD/models:/models" qsf run model.qsf --prompt "Once upon a time"
#
# The memory limit of a container is a ceiling that QSF heeds: docker run --memory 300m ...
FROM debian:bookworm-slim AS build
RUN apt-get update -q && apt-get install -y -q --no-install-recommends \
        ca-certificates gcc libc6-dev make pkg-config liblz4-dev libzstd-dev \
        python3 python3-venv
WORKDIR /src
COPY . .
RUN make wheel

FROM debian:bookworm-slim
RUN apt-get update -q && apt-get install -y -q --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/qsf
COPY --from=build /src/dist/ /tmp/dist/
RUN /opt/qsf/bin/pip install --no-cache-dir /tmp/dist/qsf-*.whl && rm -r /tmp/dist
RUN useradd --create-home user
USER user
ENV PATH=/opt/qsf/bin:$PATH
WORKDIR /models
ENTRYPOINT ["python", "-m", "qsf"]
