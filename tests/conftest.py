"""Hypothesis without deadlines: a busy machine is no fault of the code under test. No settings of DVC's of whoever runs this."""

import os
from pathlib import Path

from hypothesis import settings

for level in ("SYSTEM", "GLOBAL"):
    os.environ[f"DVC_{level}_CONFIG_DIR"] = str(Path(__file__).parent / "no settings of DVC's")

settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")
