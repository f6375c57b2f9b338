"""The training loop, in the order of Lightning's and NxDT's: log line, forward and backward, optimizer, checkpoint."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainium.rehearsal import checkpointing, state
from trainium.rehearsal.data import Batches
from trainium.rehearsal.faults import Faults
from trainium.rehearsal.lines import ProgressBar, say
from trainium.rehearsal.network import build, loss_of, optimizer_for
from trainium.rehearsal.notice import ENDED_EARLY, Notice, heeding_notice
from trainium.rehearsal.settings import Optimization, Settings
from trainium.rehearsal.state import Position, Shards


@dataclass
class Progress:
    """What the bar shows. Metrics keep the order in which they were first logged."""

    batches: Batches
    is_first_node: bool
    version: str | None
    initial_samples: int
    initial_step: int
    metrics: dict[str, float | str] = field(default_factory=dict)
    times: deque[float] = field(default_factory=lambda: deque([time.monotonic()], maxlen=11))
    throughput: float = 0.0
    peak: float = 0.0
    bar: ProgressBar | None = None

    def __post_init__(self) -> None:
        if self.version:
            self.metrics["v_num"] = self.version[-4:]

    def log(self, step: int, loss: float, lr: float, parameter_norm: float | None, gradient_norm: float | None) -> None:
        """New values for the bar; the norm of the gradients is that of the step before, as in NxDT."""
        samples = self.initial_samples + (step + 1 - self.initial_step) * self.batches.samples_per_step
        norms = {"parameter_norm": parameter_norm, "gradient_norm": gradient_norm}
        self.metrics |= {"reduced_train_loss": loss, "lr": lr}
        self.metrics |= {key: value for key, value in norms.items() if value}
        self.metrics |= {"global_step": float(step), "consumed_samples": float(samples)}
        self.metrics |= {"throughput": self.throughput, "throughput_peak": self.peak}

    def begin_batch(self, step: int) -> None:
        """A new epoch begins a new bar. Only the first node shows one."""
        epoch, batch = divmod(step, len(self.batches))
        if self.is_first_node and (self.bar is None or batch == 0):
            self.close()
            self.bar = ProgressBar(epoch, len(self.batches), batch)

    def end_batch(self) -> None:
        """Move the bar; count samples per second over the last ten steps, which the next line shows."""
        self.times.append(time.monotonic())
        seconds = self.times[-1] - self.times[0]
        self.throughput = (len(self.times) - 1) * self.batches.samples_per_step / max(seconds, 1e-9)
        self.peak = max(self.peak, self.throughput)
        if self.bar:
            self.bar.update(self.metrics)

    def tell(self, message: str) -> None:
        """A line that only global rank 0 prints."""
        if self.is_first_node:
            say(message)

    def close(self) -> None:
        """End the bar's line."""
        if self.bar:
            self.bar.close()


class Trainer:
    """One node's part of a training run."""

    def __init__(
        self, settings: Settings, shards: Shards, batches: Batches, faults: Faults, start: Path | None
    ) -> None:
        self._settings, self._shards, self._batches, self._faults = settings, shards, batches, faults
        torch.manual_seed(settings.seed)
        self._model = build(settings.model_config)
        self._optimizer = optimizer_for(self._model, settings.optimization)
        self._position = self._load(start)
        self._resumed = self._position.global_step > 0
        self._checkpoints = checkpointing.known_checkpoints(settings.experiment)
        self._progress = Progress(
            batches,
            shards.world.node == 0,
            settings.experiment.version if settings.experiment.show_version else None,
            checkpointing.consumed_samples_of(start) if start else 0,
            self._position.global_step,
        )
        self._gradient_norm: float | None = None

    def fit(self) -> None:
        """Train until max_steps or max_epochs, or until a notice: that ends in SystemExit, with the last step saved."""
        options = self._settings.optimization
        if not len(self._batches):
            self._progress.tell(
                "Total length of `DataLoader` across ranks is zero. Please make sure this was your intention."
            )
            self._progress.tell("`Trainer.fit` stopped: No training batches.")
            return
        with heeding_notice() as notice:
            for step in self._steps():
                self._progress.begin_batch(step)
                self._faults.before_step(step, resumed=self._resumed)
                noticed = self._train(step, notice)
                self._progress.end_batch()
                due = checkpointing.is_due(self._settings.experiment, step + 1)
                if due or noticed:
                    self._save()
                if noticed and step + 1 != options.max_steps:
                    self._progress.tell(f"rehearsal: asked to end (SIGUSR1), and did after saving step {step + 1}")
                    raise SystemExit(ENDED_EARLY)
        self._progress.close()
        if self._position.global_step >= options.max_steps >= 0:
            self._progress.tell(f"`Trainer.fit` stopped: `max_steps={options.max_steps}` reached.")
        else:
            self._progress.tell(f"`Trainer.fit` stopped: `max_epochs={options.max_epochs}` reached.")

    def _steps(self) -> Iterator[int]:
        options = self._settings.optimization
        by_epochs = options.max_epochs * len(self._batches) if options.max_epochs >= 0 else sys.maxsize
        by_steps = options.max_steps if options.max_steps >= 0 else sys.maxsize
        yield from range(self._position.global_step, min(by_epochs, by_steps))

    def _train(self, step: int, notice: Notice) -> bool:
        """One optimizer step over this node's micro batches, averaged with those of the other nodes.

        Returns whether any node was given notice: all of them end after the same step.
        """
        units = self._batches.micro_batch_indices(step)
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(1)
        for unit in self._shards.world.own(len(units)):
            ids, labels = self._batches.tensors(units[unit], self._settings.data.encoder_seq_length)
            loss = loss_of(self._model, ids, labels) / len(units) * self._faults.loss_factor(step)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        parameters = list(self._model.parameters())
        for parameter in parameters:
            if parameter.grad is None:  # a node without a micro batch of its own
                parameter.grad = torch.zeros_like(parameter)
        noticed = torch.tensor([float(notice.given)])
        self._shards.group.sum_([total, noticed, *(p.grad for p in parameters if p.grad is not None)])
        rate = learning_rate(self._settings.optimization, self._position.optimizer_steps)
        if step % self._settings.log_every_n_steps == 0:
            norm = self._parameter_norm() if self._settings.log_parameter_norm else None
            self._progress.log(step, float(total), rate, norm, self._gradient_norm)
        norms = torch.nn.utils.clip_grad_norm_(parameters, self._settings.optimization.clip or float("inf"))
        self._gradient_norm = float(norms) if self._settings.log_gradient_norm else None
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._position = Position(step + 1, self._position.optimizer_steps + 1)
        return bool(noticed)

    def _parameter_norm(self) -> float:
        with torch.no_grad():
            return float(
                torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p) for p in self._model.parameters()]))
            )

    def _load(self, start: Path | None) -> Position:
        """Weights, and unless `weight_init_only` the optimizer; the step count comes along whenever there is one."""
        if start is None:
            return Position()
        content = state.load_content(start)
        self._model.load_state_dict(self._shards.load_weights(start), strict=False)
        step = int(content.get("global_step", 0))
        if self._settings.experiment.weight_init_only:
            return Position(step, 0)
        done = int(content["optimizer_steps"])
        state.restore(self._model, self._optimizer, self._shards.load_optimizer(start), done)
        torch.set_rng_state(content["rng_state"])
        return Position(step, done)

    def _save(self) -> None:
        experiment, step = self._settings.experiment, self._position.global_step
        numbers = {key: value for key, value in self._progress.metrics.items() if isinstance(value, float)}
        epoch = step // len(self._batches)
        name = checkpointing.checkpoint_name(experiment.filename, numbers | {"step": step, "epoch": epoch})
        path = experiment.checkpoints / name
        kinds = state.capture(self._model, self._optimizer)
        weights = kinds[state.MASTER]
        if experiment.save_bf16:
            weights = {key: tensor.to(torch.bfloat16) for key, tensor in weights.items()}
        content = {
            "epoch": epoch,
            "global_step": step,
            "optimizer_steps": self._position.optimizer_steps,
            "rng_state": torch.get_rng_state(),
            "pytorch-lightning_version": "2.5.0",
            "rehearsal": True,
        }
        if self._progress.is_first_node:
            self._progress.close()
        self._shards.save(path, weights, kinds, content, "per-tensor" if experiment.save_xser else "inline")
        self._checkpoints = [known for known in self._checkpoints if known != path] + [path]
        for old in checkpointing.superfluous(experiment, self._checkpoints):
            self._checkpoints.remove(old)
            if self._shards.world.node == 0:
                state.remove_checkpoint(old)


def learning_rate(options: Optimization, step: int) -> float:
    """LinearAnnealingWithWarmUp: 0 → lr over warmup_steps, then down to 0 at max_steps; constant without a schedule."""
    if options.warmup_steps < 0:
        return options.lr
    if step < options.warmup_steps:
        return options.lr * step / max(1, options.warmup_steps)
    return options.lr * max(0.0, (options.max_steps - step) / max(1, options.max_steps - options.warmup_steps))
