"""Paths as blocks hold them."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def _absolute(path: Path) -> Path:
    """Job scripts run elsewhere: a relative path means the one seen from here."""
    return Path(os.path.normpath(path.expanduser().absolute()))


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
