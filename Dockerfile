# dugnad in a container: one daemon, not root, nothing written outside /data and /tmp.
#
#   docker build -t dugnad .
#   docker run --rm --read-only --tmpfs /tmp -v dugnad:/data dugnad join LINK --yes
#
# BASE needs Python 3.11 or newer with its venv module. containers/build.sh builds without any
# registry: its base is made by debootstrap, its packages come from a folder of wheels.
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
COPY . /src
RUN python3 -m venv /opt/dugnad \
    && /opt/dugnad/bin/pip install --no-cache-dir --no-compile ${PIP_OPTIONS} \
        -c /src/constraints.txt "/src[demo,fast]" \
    && /opt/dugnad/bin/pip uninstall --yes --no-cache-dir pip \
    && cd /opt/dugnad/lib/python3*/site-packages \
    && rm -rf torch/include torch/share torch/test torch/bin/test* \
    && find . -type d -name __pycache__ -prune -exec rm -rf {} +

FROM ${BASE}
# One key, one lock and one volume a peer; /link is where a bootstrap peer leaves its link.
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin dugnad \
    && install -d -o dugnad -g dugnad -m 0700 /data && install -d -o dugnad -g dugnad /link
COPY --from=build /opt/dugnad /opt/dugnad
COPY containers/demo.toml /usr/share/dugnad/demo.toml
ENV PATH=/opt/dugnad/bin:/usr/local/bin:/usr/bin:/bin \
    DUGNAD_HOME=/data \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /usr/share/dugnad
VOLUME ["/data"]
# SIGTERM is what `dugnad leave` does: ten seconds to hand in, five to write. Stop with 20 s of grace.
STOPSIGNAL SIGTERM
# A paused peer (exit 3) is well.
HEALTHCHECK --interval=15s --timeout=10s --start-period=90s --retries=4 \
    CMD dugnad status --quiet || [ $? -eq 3 ] || exit 1
ENTRYPOINT ["dugnad"]
CMD ["--help"]
