"""Stage ``report``: one self-contained page about the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas import console, fs
from eyas.report.page import render
from eyas.report.sources import gather
from eyas.stages import common


def main(argv: Sequence[str]) -> None:
    """Write the page from the records of the stages before."""
    (page,) = common.paths("report", ("PAGE",), argv)
    with common.stage_run("report", reads=(), writes=(page,)):
        fs.write_text(page, render(gather(Path())))
    console.log(f"report: {page}")


if __name__ == "__main__":
    console.run_main(main)
