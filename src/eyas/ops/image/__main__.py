"""``python -m eyas.ops.image``: what ``make pins image image-check shell`` and ``IN_CONTAINER=1`` call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import EyasError
from eyas.ops.image.builder import Builder, find_builder
from eyas.ops.image.check import check
from eyas.ops.image.kernels import table
from eyas.ops.image.pins import read_pins
from eyas.ops.image.run import run
from eyas.ops.image.sbom import write_sbom

TARGETS = ("cpu", "ci", "cuda")


def image_name(target: str) -> str:
    """Of a target's image on this machine."""
    return f"localhost/eyas:{target}"


def main() -> None:
    """Run one verb."""
    parser = argparse.ArgumentParser(prog="python -m eyas.ops.image", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("pins", help="what images are built from")
    for verb, what in (
        ("build", "build an image"),
        ("check", "build it twice, compare, look inside"),
        ("sbom", "list what is in it, as SPDX"),
        ("push", "push it to a registry, by REGISTRY_USER and REGISTRY_TOKEN where they are set"),
        ("run", "run in it"),
    ):
        one = verbs.add_parser(verb, help=what)
        one.add_argument("--target", choices=TARGETS, default="cpu", help="(%(default)s)")
        if verb == "push":
            one.add_argument("--to", required=True, metavar="REGISTRY/NAME:TAG")
        if verb == "run":
            one.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARGUMENTS")
    kernels = verbs.add_parser("kernels", help="GPU architectures of the libraries in wheels or folders")
    kernels.add_argument("paths", nargs="+", type=Path, metavar="WHEEL|FOLDER")
    kernels.add_argument("--architectures", type=int, nargs="+", default=[90, 100, 120], help="wanted (%(default)s)")
    kernels.add_argument("--require", default="common_ops", help="libraries that must have them all (%(default)s)")
    args = parser.parse_args()
    try:
        sys.exit(act(args))
    except EyasError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


def say(text: str) -> None:
    """A line about the check."""
    sys.stderr.write(f"image-check: {text}\n")


def act(args: argparse.Namespace) -> int:
    """What the arguments ask for; the exit code."""
    if args.verb == "kernels":
        return show_kernels(args.paths, args.architectures, args.require)
    root = Path.cwd()
    pins = read_pins(root)
    if args.verb == "pins":
        sys.stdout.write("".join(f"{name}  {image}\n" for name, image in pins.items()))
        return 0
    builder, name = find_builder(), image_name(args.target)
    if args.verb == "build":
        builder.build(root, args.target, name, pins)
        image = builder.inspect(name)
        sys.stderr.write(f"{name}  {image.digest}  {image.size_bytes / 1e9:.2f} GB\n")
        return 0
    if args.verb == "check":
        check(root, builder, args.target, name, pins, say)
        say("twice the same bytes, and it works")
        return 0
    if args.verb == "push":
        push(builder, name, args.to)
        return 0
    if args.verb == "sbom":
        path, number = write_sbom(root, builder, args.target, name)
        sys.stderr.write(f"{path.relative_to(root)}: {number:,} packages\n")
        return 0
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return run(root, builder, name, command or ["bash"])


def push(builder: Builder, name: str, to: str) -> None:
    """Push, and say the digest: on standard output, and to a workflow's next steps."""
    user, token = os.environ.get("REGISTRY_USER", ""), os.environ.get("REGISTRY_TOKEN", "")
    digest = builder.push(name, to, user, token)
    sys.stdout.write(f"{to}@{digest}\n")
    if outputs := os.environ.get("GITHUB_OUTPUT"):
        with Path(outputs).open("a") as file:
            file.write(f"digest={digest}\n")


def show_kernels(paths: Sequence[Path], wanted: Sequence[int], required: str) -> int:
    """A table; 1 when a required library is absent or lacks an architecture."""
    text, lacking = table(paths, wanted)
    sys.stdout.write(text + "\n")
    faults = [name for name in lacking if required in name]
    if required not in text:
        faults.append(f"no library {required}")
    sys.stderr.write("".join(f"error: {fault} lacks a wanted architecture\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
