"""Will it work, and what will it make? Answered from the recipe and the model's config.json, without a cluster."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainium.config.rules import RULES, Facts, Finding, layout_of
from trainium.config.schema import Recipe
from trainium.errors import UserError

OPTIMIZER_BYTES = 12  # per parameter: float32 master weight and two moments


class PlanError(UserError):
    """The recipe cannot work as it is; every error that was found is in the message."""

    def __init__(self, recipe: str, errors: Iterable[Finding]) -> None:
        self.findings = tuple(errors)
        count = "one error" if len(self.findings) == 1 else f"{len(self.findings)} errors"
        super().__init__(
            f"recipe {recipe} cannot work as it is, {count}:" + "".join(f"\n  - {finding}" for finding in self.findings)
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the run will make. Sizes in bytes, None until config.json is there; `tokens` is the most that fits."""

    cores: int
    data_parallel: int
    gradient_accumulation: int
    shards: int
    model_bytes: int | None
    optimizer_bytes: int | None
    steps: int
    checkpoints: int
    kept_checkpoints: int
    samples: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All findings and the prediction. `verified`: config.json was there, so every rule could look at it."""

    recipe: str
    verified: bool
    findings: tuple[Finding, ...]
    predicted: Predicted

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self.of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return self.of("warning")

    def of(self, severity: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def check(self) -> None:
        """Raise PlanError with all errors, if there are any."""
        if self.errors:
            raise PlanError(self.recipe, self.errors)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(recipe: Recipe, model_config: Mapping[str, Any] | None = None) -> Plan:
    """Apply every rule. Without the model's config.json the rules that need it use `model.expected` or wait."""
    facts = Facts(recipe, model_config)
    findings = tuple(finding for rule in RULES for finding in rule(facts))
    return Plan(
        recipe=recipe.name,
        verified=model_config is not None,
        findings=findings,
        predicted=_predict(facts),
    )


def _predict(facts: Facts) -> Predicted:
    recipe, arch = facts.recipe, facts.architecture
    training, layout = recipe.training, layout_of(recipe)
    # NxD shards keep the base's dtype; bf16 or fp16 unless config.json says float32.
    dtype = (facts.model_config or {}).get("torch_dtype") or (facts.model_config or {}).get("dtype")
    checkpoints = training.max_steps // training.checkpoint_every
    samples = training.max_steps * training.global_batch_size
    return Predicted(
        cores=facts.world,
        data_parallel=facts.data_parallel,
        gradient_accumulation=facts.accumulation,
        shards=layout.shard_count,
        model_bytes=layout.predicted_bytes(arch, 4 if dtype == "float32" else 2) if arch else None,
        optimizer_bytes=layout.predicted_bytes(arch, OPTIMIZER_BYTES) if arch else None,
        steps=training.max_steps,
        checkpoints=checkpoints,
        kept_checkpoints=checkpoints
        if training.keep_checkpoints == -1
        else min(checkpoints, training.keep_checkpoints),
        samples=samples,
        tokens=samples * training.seq_length,
    )
