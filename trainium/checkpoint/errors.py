"""What can be wrong with a model, a layout or a checkpoint, as the user sees it."""

from trainium.errors import UserError


class ArchitectureError(UserError):
    """The model cannot be laid out as a Llama."""


class LayoutError(UserError):
    """The parallel layout does not fit the model, or not the checkpoint."""


class CheckpointError(UserError):
    """A file or folder of weights is missing, damaged, refused, or holds something else than it should."""
