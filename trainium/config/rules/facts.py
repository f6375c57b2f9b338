"""What a rule looks at, and what it says."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import ArchitectureError
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import Layout
from trainium.config.instances import INSTANCES, InstanceType
from trainium.config.schema import Recipe

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a rule noticed. `key` is the recipe's dotted key, `value` what it holds, `fix` what to write instead,
    `source` where the rule comes from."""

    id: str
    severity: Severity
    key: str
    value: str
    message: str
    fix: str
    source: str

    def __str__(self) -> str:
        shown = f"{self.key}={self.value}" if self.value else self.key
        return f"{shown}: {self.message}." + (f" {self.fix}." if self.fix else "")

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """A recipe and, where it is there, the model's config.json."""

    recipe: Recipe
    model_config: Mapping[str, Any] | None

    @property
    def instance(self) -> InstanceType:
        return INSTANCES[self.recipe.instance_type]

    @property
    def cores(self) -> int:
        """Training processes on one node."""
        return self.instance.cores_for(self.recipe.parallelism.tensor, self.recipe.parallelism.pipeline)

    @property
    def world(self) -> int:
        """Training processes on all nodes."""
        return self.cores * self.recipe.resources.nodes

    @property
    def data_parallel(self) -> int:
        """Replicas of the whole model; 0 when not even one fits."""
        return self.world // (self.recipe.parallelism.tensor * self.recipe.parallelism.pipeline)

    @property
    def accumulation(self) -> int:
        """Forward passes of one replica per optimizer step."""
        training = self.recipe.training
        return training.global_batch_size // (training.micro_batch_size * max(1, self.data_parallel))

    @cached_property
    def architecture(self) -> Architecture | None:
        """The model as config.json has it; None without one, or when it cannot be laid out."""
        try:
            return None if self.model_config is None else Architecture.from_config(self.model_config)
        except ArchitectureError:
            return None

    @cached_property
    def assumed(self) -> Architecture | None:
        """The architecture, or before config.json is there the recipe's expected shape with sizes that fit any tp."""
        expected = self.recipe.model.expected
        if self.architecture is not None or expected is None or self.model_config is not None:
            return self.architecture
        divisible = math.lcm(*range(1, expected.heads + 1), self.recipe.parallelism.tensor)
        return Architecture(
            layers=expected.layers,
            hidden=expected.hidden_size,
            heads=expected.heads,
            kv_heads=expected.kv_heads,
            head_dim=max(1, expected.hidden_size // expected.heads),
            intermediate=divisible,
            vocab=divisible,
        )


def layout_of(recipe: Recipe) -> Layout:
    """The recipe's parallel layout, as the converters take it (`qkv` perhaps still `auto`)."""
    parallelism = recipe.parallelism
    return Layout(
        tp=parallelism.tensor,
        pp=parallelism.pipeline,
        kv_replicator=parallelism.kv_replicator,
        qkv=recipe.convert.qkv,
        virtual_pp=parallelism.virtual_pipeline,
        instance_family=INSTANCES[recipe.instance_type].family,
    )


def read_model_config(recipe: Recipe) -> dict[str, Any] | None:
    """config.json of a model that is already in a folder (`model.source`, or `model.folder` of an earlier run).

    Raises UserError when it is not a JSON object.
    """
    folders = [recipe.model.source] if recipe.model.kind == "folder" else []
    folders += [recipe.model.folder] if recipe.model.folder else []
    for folder in folders:
        path = Path(folder) / "config.json"
        if path.is_file():
            return read_config(path)
    return None
