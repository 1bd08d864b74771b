#!/usr/bin/env bash
# A base image from this machine's own Debian packages, for machines that reach no registry: equal packages give equal
# bytes. Needs buildah and mmdebstrap; an ordinary user needs further ids too (package uidmap).   bash containers/debian-base.sh TAG
set -euo pipefail
tag=${1:?usage: debian-base.sh TAG}
export SOURCE_DATE_EPOCH=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. /etc/os-release
for source in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list; do
  if [[ -s $source ]]; then cat "$source" && echo; fi
done | mmdebstrap --quiet --skip=output/dev --variant=apt --include=ca-certificates,python3,python3-venv \
  --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' "$VERSION_CODENAME" "$work/rootfs.tar" -
box=$(buildah from scratch)
buildah add -q "$box" "$work/rootfs.tar" / >/dev/null
buildah config --cmd bash --env LANG=C.UTF-8 "$box"
buildah commit -q --timestamp "$SOURCE_DATE_EPOCH" "$box" "$tag"
buildah rm "$box" >/dev/null
