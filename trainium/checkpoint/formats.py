"""What weights can be written as; imported by the command line, so nothing here may import numpy or torch."""

from typing import Literal

# The names are torch's and those of a config.json.
FloatDtype = Literal["bfloat16", "float16", "float32"]

# inline: one file per rank, as NxD's converter writes; per-tensor: one file per tensor, as training writes.
Form = Literal["inline", "per-tensor"]
