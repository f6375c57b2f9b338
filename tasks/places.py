"""Where a run keeps things, unless its recipe names a place of its own."""

from dataclasses import dataclass
from pathlib import Path

from trainium.config.schema import Recipe
from trainium.run.folder import RunFolder


@dataclass(frozen=True)
class Places:
    """Absolute paths of one run (`load_recipe` made the recipe's absolute). A local model is read where it is."""

    folder: RunFolder
    recipe: Recipe

    @property
    def base(self) -> Path:
        model = self.recipe.model
        if model.kind == "folder":
            return Path(model.source)
        return Path(model.folder) if model.folder else self.folder.path / "base"

    @property
    def source_data(self) -> Path:
        """The rows as they were fetched, before columns are mapped."""
        dataset = self.recipe.dataset
        if dataset.kind == "folder":
            return Path(dataset.source)
        return Path(dataset.folder) if dataset.folder else self.folder.path / "source-data"

    @property
    def data(self) -> Path:
        """train.jsonl and validation.jsonl with exactly `input` and `output`, as the trainer reads them."""
        return self.folder.path / "data"

    @property
    def train_rows(self) -> Path:
        return self.data / "train.jsonl"

    @property
    def validation_rows(self) -> Path:
        return self.data / "validation.jsonl"

    @property
    def nxd(self) -> Path:
        return self.folder.path / "nxd"

    @property
    def cache(self) -> Path:
        cache = self.recipe.compile.cache
        return Path(cache) if cache else self.folder.path / "cache"

    @property
    def experiment(self) -> Path:
        """NxDT's explicit log folder."""
        return self.folder.path / "experiment"

    @property
    def checkpoints(self) -> Path:
        return self.experiment / "checkpoints"

    @property
    def export(self) -> Path:
        return self.folder.path / "export"
