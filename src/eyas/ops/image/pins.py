"""What images are built from: ``containers/pins.env``, every base by digest."""

from __future__ import annotations

import os
import re
from pathlib import Path

from eyas.errors import ConfigError

PINS = Path("containers/pins.env")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
LOCAL = "localhost/"
"""Images of this machine alone; what a build took is looked up by their id."""


def read_pins(root: Path) -> dict[str, str]:
    """Base images by build argument, those of the environment before those of the file.

    Raises:
        ConfigError: The file is not there, a line is no ``NAME=image``, or an image has no digest.
    """
    path = root / PINS
    if not path.is_file():
        raise ConfigError(f"{path} is missing", "run it in a clone of eyas")
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, image = line.partition("=")
        if not re.fullmatch(r"BASE_[A-Z0-9_]+", name) or not image:
            raise ConfigError(f"{path}:{number}: {line!r}, expected BASE_NAME=image@sha256:…")
        pins[name] = os.environ.get(name) or image
    for name, image in pins.items():
        check_pin(name, image)
    return pins


def check_pin(name: str, image: str) -> None:
    """Refuse an image that can change behind its name.

    Raises:
        ConfigError: It has no digest and is not of this machine.
    """
    if not DIGEST.search(image) and not image.startswith(LOCAL):
        raise ConfigError(
            f"{name}: {image!r} has no digest, expected IMAGE:TAG@sha256:<64 hex digits>",
            "`skopeo inspect docker://IMAGE:TAG` or `docker buildx imagetools inspect IMAGE:TAG` tells it",
        )
