#!/usr/bin/env bash
# Builds the image without a container engine and without a registry of images, and runs it once:
# a base by debootstrap, packages from wheels that pip gathers here, buildah, podman. Needs root,
# Debian's buildah, podman, runc and debootstrap, and a Python like Debian's (3.11) for the wheels.
#
#   containers/build.sh [WORK]     WORK: a folder for base and wheels, kept for the next time
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-build/containers}
suite=${SUITE:-bookworm}
python=${PYTHON:-python3.11}
mkdir -p "$work/wheels"
work=$(cd "$work" && pwd)
# What runc needs where the hard limits may not be raised.
limits=(--ulimit nofile=1024:1024 --ulimit nproc=4096:4096)

started=$SECONDS
say() { printf '%4d s  %s\n' "$((SECONDS - started))" "$*"; }

if [ ! -e "$work/base.tar" ]; then
    [ -d "$work/rootfs" ] || debootstrap --variant=minbase \
        --include=python3,python3-venv,ca-certificates "$suite" "$work/rootfs" >"$work/debootstrap.log"
    rm -rf "$work/rootfs"/var/cache/apt/* "$work/rootfs"/var/lib/apt/lists/* \
        "$work/rootfs"/usr/share/{doc,man,locale,info}/*
    tar -C "$work/rootfs" -cf "$work/base.tar" .
fi
say "base: $(stat -c %s "$work/base.tar") bytes"
if [ ! -e "$work/base.done" ]; then
    mkdir -p "$work/base" && ln -f "$work/base.tar" "$work/base/base.tar"
    printf 'FROM scratch\nADD base.tar /\n' >"$work/base/Dockerfile"
    buildah bud --isolation chroot -t localhost/dugnad-base "$work/base" >"$work/base.log" 2>&1
    touch "$work/base.done"
fi
"$python" -m pip wheel --quiet -c constraints.txt -w "$work/wheels" '.[demo,fast]' 'setuptools>=77' wheel \
    2>"$work/wheels.log"
rm -rf build/lib build/bdist.* dugnad.egg-info  # what setuptools leaves behind
rm -f "$work"/wheels/dugnad-*.whl  # the image builds its own from the sources
say "wheels: $(ls "$work/wheels" | wc -l) files, $(du -sm "$work/wheels" | cut -f1) MB"

buildah bud --isolation chroot --volume "$work/wheels:/wheels:ro" \
    --build-arg BASE=localhost/dugnad-base \
    --build-arg PIP_OPTIONS="--no-index --find-links /wheels" \
    --format docker -t localhost/dugnad . >"$work/image.log" 2>&1 || { tail -20 "$work/image.log"; exit 1; }
say "image: $(buildah images --format '{{.Size}}' localhost/dugnad)"

run() { podman --runtime runc run "${limits[@]}" --read-only --tmpfs /tmp --cap-drop all "$@"; }
run --rm --network none localhost/dugnad version
run --rm --network none --entrypoint id localhost/dugnad
trap 'podman rm -f dugnad-trial >/dev/null 2>&1 || true' EXIT
run -d --name dugnad-trial --network none localhost/dugnad \
    start demo.toml --yes --listen 127.0.0.1:31400 --dashboard 127.0.0.1:8080 >/dev/null
for _ in $(seq 60); do
    if podman exec dugnad-trial dugnad status --json 2>/dev/null | grep -q '"merges": [2-9]'; then break; fi
    sleep 1
done
podman exec dugnad-trial dugnad status
podman exec dugnad-trial sh -c 'dugnad status --quiet || [ $? -eq 3 ] || exit 1' && say "healthy"
podman exec dugnad-trial sh -c 'touch /opt/x 2>/dev/null && exit 1 || echo "the root file system is read-only"'
before=$SECONDS
podman stop --time 20 dugnad-trial >/dev/null
say "stopped in $((SECONDS - before)) s: $(podman inspect --format 'exit {{.State.ExitCode}}' dugnad-trial), $(podman logs dugnad-trial 2>&1 | tail -1)"
