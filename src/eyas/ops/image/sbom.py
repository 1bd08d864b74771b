"""What is in an image, package by package, as SPDX: by syft, over the image's own archive."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from eyas.ops.image.builder import Builder, ImageError

OUTPUT = "reports/sbom-{target}.spdx.json"
LEAST_PACKAGES = 100
"""An environment of ours has more; fewer mean that syft looked past it."""


def write_sbom(root: Path, builder: Builder, target: str, name: str) -> tuple[Path, int]:
    """Write ``reports/sbom-<target>.spdx.json``; gives its path and the number of packages.

    Raises:
        ImageError: There is no such image, syft is not here, or it found too little.
    """
    builder.inspect(name)
    out = root / OUTPUT.format(target=target)
    with tempfile.TemporaryDirectory(dir=root) as folder:  # an image's archive is larger than many a /tmp
        archive, found = Path(folder) / "image.tar", Path(folder) / "sbom.json"
        builder.save(name, archive)
        command = ["syft", "scan", "-q", f"docker-archive:{archive}", "--source-name", name, "-o", f"spdx-json={found}"]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false"},
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise ImageError("syft is not here", "`make sbom` installs it with the tools of development") from None
        if done.returncode:
            raise ImageError(f"syft failed on {name}: {done.stderr.strip()[-300:]}", "its message says why")
        number = len(json.loads(found.read_text())["packages"])
        if number < LEAST_PACKAGES:
            raise ImageError(
                f"syft found {number} packages in {name}, expected at least {LEAST_PACKAGES}", "is it ours?"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        os.replace(found, out)
    return out, number
