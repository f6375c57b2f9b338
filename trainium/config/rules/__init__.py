"""Everything that is checked before anything is submitted. One rule is one function from facts to findings."""

from collections.abc import Callable, Iterator

from trainium.config.rules import model, parallelism, training
from trainium.config.rules.facts import Facts, Finding, Severity, layout_of, read_model_config

__all__ = ["RULES", "Facts", "Finding", "Rule", "Severity", "layout_of", "read_model_config"]

Rule = Callable[[Facts], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    model.inputs,
    model.family,
    model.expected_shape,
    model.positions,
    model.experiment_name,
    parallelism.world_size,
    parallelism.layout,
    parallelism.virtual_pipeline,
    parallelism.sequence,
    parallelism.batch,
    parallelism.upstream_converter,
    parallelism.conversion_shares,
    training.cadence,
    training.warmup,
    training.weight_decay,
    training.compiler_cache,
    training.precision,
    training.async_checkpointing,
    training.requeue,
    training.notice,
    training.cpus,
    training.just_in_time,
    training.packing,
)
