#!/usr/bin/env bash
# Whether buildah builds and runs images here: a container of one program. Ends otherwise than with 0, and its messages
# say why, where a machine forbids what building needs (mounts, chroot) or has no room.   bash containers/can-build.sh
set -euo pipefail
least_gb=15
type -P mmdebstrap >/dev/null || { echo "no mmdebstrap, which makes the base" >&2; exit 1; }
store=$(buildah info --format '{{.store.GraphRoot}}')
free_gb=$(($(df --output=avail -B 1000000000 "$store" | tail -n 1)))
((free_gb >= least_gb)) || { echo "$free_gb GB free for images, at least $least_gb are needed" >&2; exit 1; }
work=$(mktemp -d)
box=
trap 'rm -rf "$work"; [[ -z $box ]] || buildah rm "$box" >/dev/null' EXIT
program=$(realpath "$(type -P true)")
mapfile -t files < <(ldd "$program" | grep -o '/[^ ]*')
tar --create --dereference --absolute-names --transform 's,^/,,' --file "$work/root.tar" "$program" "${files[@]}"
box=$(buildah from scratch)
buildah add --quiet "$box" "$work/root.tar" / >/dev/null
buildah run --isolation=chroot "$box" -- "$program"
buildah rmi "$(buildah commit --quiet "$box")" >/dev/null
