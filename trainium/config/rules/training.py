"""Rules about steps, checkpoints, precision and jobs."""

import math
from collections.abc import Iterator

from trainium.config.fields import as_timedelta
from trainium.config.rules.facts import Facts, Finding
from trainium.config.schema import StageResources

NXDT_WEIGHT_DECAY = 0.01  # fixed in NxDT's parameter groups, whatever the config says


def cadence(facts: Facts) -> Iterator[Finding]:
    """NxDT saves every n steps and not at the end: the last step must be one of them, or the last work is lost."""
    training = facts.recipe.training
    steps, every = training.max_steps, training.checkpoint_every
    if steps % every == 0:
        return
    small = [value for value in range(1, math.isqrt(steps) + 1) if steps % value == 0]
    divisors = sorted({*small, *(steps // value for value in small)})
    nearest = min(divisors, key=lambda value: abs(value - every))
    below, above = steps // every * every, (steps // every + 1) * every
    yield Finding(
        id="checkpoint-cadence",
        severity="error",
        key="training.checkpoint_every",
        value=str(every),
        message=f"the last step, {steps}, is not one of those that are saved, so its work would be lost",
        fix=(
            f"Use training.checkpoint_every={nearest}, or training.max_steps={f'{below} or ' if below else ''}{above}"
        ),
        source="neuronx-distributed-training, utils/exp_manager.py",
    )


def warmup(facts: Facts) -> Iterator[Finding]:
    training = facts.recipe.training
    if training.warmup_steps >= training.max_steps:
        yield Finding(
            id="warmup",
            severity="error",
            key="training.warmup_steps",
            value=str(training.warmup_steps),
            message=f"training ends after {training.max_steps} steps, before the learning rate is reached",
            fix=f"Use {max(0, training.max_steps // 10)}, or more max_steps",
            source="neuronx-distributed-training, optim/lr_schedulers.py",
        )


def weight_decay(facts: Facts) -> Iterator[Finding]:
    training = facts.recipe.training
    if training.weight_decay != NXDT_WEIGHT_DECAY:
        yield Finding(
            id="weight-decay",
            severity="warning",
            key="training.weight_decay",
            value=str(training.weight_decay),
            message=f"NxDT does not read it: its parameter groups decay by {NXDT_WEIGHT_DECAY} or not at all",
            fix=f"Use {NXDT_WEIGHT_DECAY}, which is what will happen",
            source="neuronx-distributed-training, get_param_groups_by_weight_decay",
        )


def packing(facts: Facts) -> Iterator[Finding]:
    if facts.recipe.training.packing:
        yield Finding(
            id="packing",
            severity="note",
            key="training.packing",
            value="true",
            message=(
                "NxDT then learns the prompts as well as the answers, and drops rows longer than "
                f"{facts.recipe.training.seq_length - 1} tokens without a word"
            ),
            fix="training.packing=false masks the prompts and is slower",
            source="neuronx-distributed-training, data/datasets/ConcatDataset.py",
        )


def compiler_cache(facts: Facts) -> Iterator[Finding]:
    if "--cache_dir" in facts.recipe.training.compiler_flags:
        yield Finding(
            id="cache-dir",
            severity="error",
            key="training.compiler_flags",
            value=repr(facts.recipe.training.compiler_flags),
            message="--cache_dir beats the cache folder that the run fills and checks",
            fix="Leave it out and set compile.cache",
            source="libneuronxla, neuron_cc_cache",
        )


def precision(facts: Facts) -> Iterator[Finding]:
    training = facts.recipe.training
    if training.precision in ("mixed_precision", "autocast") and not facts.recipe.parallelism.zero1:
        yield Finding(
            id="precision-zero1",
            severity="warning",
            key="parallelism.zero1",
            value="false",
            message=f"{training.precision} keeps float32 master weights and gradients only with ZeRO-1",
            fix="Use parallelism.zero1=true",
            source="neuronx-distributed-training, lightning_modules/model/base.py",
        )


def async_checkpointing(facts: Facts) -> Iterator[Finding]:
    if facts.recipe.training.async_checkpointing and not facts.instance.is_rehearsal:
        yield Finding(
            id="async-checkpointing",
            severity="warning",
            key="training.async_checkpointing",
            value="true",
            message="every process is forked to save: below 64 nodes AWS expects the host to run out of memory",
            fix="Use training.async_checkpointing=false",
            source="NxDT documentation, known issues",
        )


def requeue(facts: Facts) -> Iterator[Finding]:
    if facts.recipe.resources.requeue is not False:
        yield Finding(
            id="requeue",
            severity="warning",
            key="resources.requeue",
            value=str(facts.recipe.resources.requeue),
            message=(
                "a training job that Slurm restarts by itself reads the same config again and starts from where that "
                "said, not from the newest checkpoint"
            ),
            fix="Use resources.requeue=false: the flow starts the next attempt from the newest complete checkpoint",
            source="neuronx-distributed-training, examples/training.py",
        )


def notice(facts: Facts) -> Iterator[Finding]:
    """The notice before the time limit of the training job comes after its start."""
    train = facts.recipe.resources.train
    seconds = as_timedelta(train.time).total_seconds()
    if train.signal_before_end is not None and train.signal_before_end >= seconds:
        yield Finding(
            id="notice",
            severity="error",
            key="resources.train.signal_before_end",
            value=str(train.signal_before_end),
            message=f"the job has {seconds:.0f} s in all (resources.train.time), so it would be asked to end at once",
            fix=f"Use fewer than {seconds:.0f} seconds, or null",
            source="man sbatch, --signal",
        )


def cpus(facts: Facts) -> Iterator[Finding]:
    """Compilation and the host side of training want all CPUs of the node; more than it has never starts."""
    available = facts.instance.vcpus
    if available is None:
        return
    stages: dict[str, StageResources] = {
        "compile": facts.recipe.resources.compile,
        "train": facts.recipe.resources.train,
    }
    for stage, asked in stages.items():
        if asked.cpus_per_task != available:
            over = asked.cpus_per_task > available
            yield Finding(
                id="cpus",
                severity="error" if over else "warning",
                key=f"resources.{stage}.cpus_per_task",
                value=str(asked.cpus_per_task),
                message=(
                    f"a {facts.instance.name} has {available} CPUs"
                    + ("" if over else "; with fewer, compiling and training take many times longer")
                ),
                fix=f"Use {available}",
                source="tutorial, problem 27",
            )


def just_in_time(facts: Facts) -> Iterator[Finding]:
    if facts.recipe.compile.mode == "jit":
        yield Finding(
            id="jit",
            severity="note",
            key="compile.mode",
            value="jit",
            message="graphs compile during the first steps of training, on the whole allocation, one after another",
            fix="compile.mode=aot compiles them in parallel first and shows which one fails",
            source="tutorial, problem 29",
        )
