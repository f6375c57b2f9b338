"""Training progress from the text of the log."""

import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from trainium.logs.progress import Point, parse_point
from trainium.logs.training import TrainingLog, TrainingProgress

LATE = (
    "Epoch 0:   3%|▎         | 3/91 [16:05<7:52:06, 321.89s/it, loss=6.7, v_num=2, reduced_train_loss=13.40, "
    "lr=7.5e-9, parameter_norm=5536.0, global_step=1.000, consumed_samples=2048.0]"
)
EARLY = (
    "Epoch 0:   6%|▋         | 4/62 [03:24<49:27,  0.02it/s, v_num=8-06, reduced_train_loss=6.790, lr=5.45e-5, "
    "parameter_norm=1.95e+3, global_step=3.000, consumed_samples=64.00, throughput=0.181, throughput_peak=0.146, "
    "gradient_norm=6.590]"
)
END = "`Trainer.fit` stopped: `max_steps=6` reached.\n"


def bar(step: float, elapsed: str, loss: object = 2.5) -> str:
    return (
        f"\rEpoch 0: | {step:.0f}/6 [{elapsed}<?, 0.02it/s, global_step={step:.3f}, lr=1e-4, reduced_train_loss={loss}]"
    )


def read(text: str, **options: object) -> TrainingProgress:
    log = TrainingLog(Path("output.log"), **options)  # type: ignore[arg-type]
    log.feed(text.encode())
    return log.progress


def test_both_forms_of_the_progress_line() -> None:
    assert parse_point(LATE, LATE.index("global_step=")) == Point(
        step=1, loss=13.4, lr=7.5e-9, elapsed=965.0, parameter_norm=5536.0, consumed_samples=2048
    )
    assert parse_point(EARLY, EARLY.index("global_step=")) == Point(
        step=3,
        loss=6.79,
        lr=5.45e-5,
        elapsed=204.0,
        throughput=0.181,
        parameter_norm=1950.0,
        gradient_norm=6.59,
        consumed_samples=64,
    )


def test_values_in_any_order_and_notation() -> None:
    line = (
        "| 3/? [1:02:03<?, ?it/s, global_step=1.44e+5, gradient_norm=inf, reduced_train_loss=NaN, consumed_samples=nan]"
    )
    point = parse_point(line, line.index("global_step="))
    assert point is not None
    assert (point.step, point.elapsed, point.gradient_norm, point.consumed_samples) == (144000, 3723.0, math.inf, None)
    assert point.loss is not None
    assert math.isnan(point.loss)
    days = "3it [1 day, 00:00:01, 1.0s/it, global_step=7.000]"
    point = parse_point(days, days.index("global_step="))
    assert point is not None
    assert (point.step, point.elapsed) == (7, 86401.0)
    assert parse_point("global_step=soon]", 0) is None


def test_steps_are_taken_once_and_timed_by_the_clock_of_the_bar() -> None:
    text = bar(1, "00:30") + bar(1, "00:31") + bar(2, "00:40") + bar(4, "01:00") + "\n"
    progress = read(text, max_steps=6)
    assert [point.step for point in progress.points] == [1, 2, 4]
    assert progress.points[0].elapsed == 30.0
    assert (progress.step, progress.seconds_per_step, progress.eta_seconds) == (4, 10.0, 20.0)
    assert not progress.problems
    assert not progress.finished


def test_glued_bars_are_both_read() -> None:
    text = (bar(1, "00:30") + bar(2, "00:40", 9.0)).replace("\r", "") + "\n"
    assert [(point.step, point.loss) for point in read(text).points] == [(1, 2.5), (2, 9.0)]


def test_the_newest_state_of_a_bar_counts_without_a_line_end() -> None:
    assert read(bar(1, "00:30") + bar(2, "00:40")).step == 2
    assert read(bar(1, "00:30") + bar(2, "00:40")[:-20]).step == 1


def test_checkpoints_with_their_durations() -> None:
    line = "[2025-06-30 {}: I neuronx_distributed/trainer/checkpoint.py:700] synced saving of checkpoint {}\n"
    progress = read(
        line.format("09:00:00.100", "step_5 began")
        + line.format("09:10:30.200", "step_5 completed")
        + line.format("10:00:00.000", "step_10 began")
        + "async saving of checkpoint hf--step=15-consumed_samples=8.0.ckpt requested\n"
    )
    assert [(c.step, c.complete, c.seconds) for c in progress.checkpoints] == [
        (5, True, 630.0),
        (10, False, None),
        (15, False, None),
    ]


def test_the_positive_end() -> None:
    progress = read(bar(1, "00:30") + "\n" + END, max_steps=6)
    assert (progress.finished, progress.problems, progress.step) == (True, (), 6)


def test_an_end_without_the_marker_is_a_problem() -> None:
    log = TrainingLog(Path("output.log"))
    log.feed(bar(1, "00:30").encode())
    assert not log.progress.problems
    log.close()
    assert [problem.rule for problem in log.progress.problems] == ["no-end-marker"]


def test_problems_of_jobs_that_exit_0() -> None:
    lines = {
        "nothing-trained": "`Trainer.fit` stopped: No training batches.",
        "resume-discarded": "… (ckpt_path='/p')`. The latter will be loaded.",
        "unexpected-keys": "Warning: Unexpected keys in state dictionary: ['x']",
        "loss-not-finite": bar(3, "00:30", "nan"),
        "from-scratch": "There were no checkpoints found in /e. Training from scratch.",
        "config-not-found": "Error: YAML file './conf/X.yaml' not found!",
    }
    for rule, line in lines.items():
        assert [p.rule for p in read(line + "\n" + END, expect_resume=True).problems] == [rule]
    assert not read(lines["from-scratch"] + "\n").problems
    assert not read("| 3/6 [00:30<?, loss=nan, reduced_train_loss=2.5, global_step=3.0]\n").problems


def test_errors_that_a_job_may_survive_explain_and_do_not_decide() -> None:
    progress = read("ERROR  TDRV:log_dev_mem   Failed to allocate 4.000GB (usage: tensors) on ND 0:NC 4\n")
    assert not progress.problems
    assert [d.rule for d in progress.diagnoses] == ["device-memory"]


def test_a_restart_in_the_same_log_voids_the_steps_behind_its_checkpoint() -> None:
    progress = read("".join(bar(step, f"00:{step}0") for step in (1, 2, 3, 4)) + "\n" + bar(3, "00:07", 1.0) + "\n")
    assert [(point.step, point.loss) for point in progress.points] == [(1, 2.5), (2, 2.5), (3, 1.0)]


def test_compilations_during_training_are_counted() -> None:
    assert read("INFO ||NEURON_CC_WRAPPER||: Call compiler with cmd: neuronx-cc\n" * 3).compilations == 3


WHOLE = (
    "".join(f"[2025-06-30 08:47:3{i}.316: I x.py:1] line {i} ▎\n" for i in range(9))
    + bar(1, "00:30")
    + bar(2, "00:40", "nan")
    + "\n0: Traceback (most recent call last):\n0:   File \"/h/t.py\", line 9, in main\n0:     go()\n0: KeyError: 'x'\n"
    + "synced saving of checkpoint step_5 began\r\nsynced saving of checkpoint step_5 completed\n"
    + END
    + LATE
    + "\r"
    + EARLY
).encode() + b"\xff\0\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_the_pieces_in_which_a_log_arrives_make_no_difference(cuts: list[int]) -> None:
    at_once, in_pieces = TrainingLog(Path("output.log")), TrainingLog(Path("output.log"))
    at_once.feed(WHOLE)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(WHOLE)], strict=True):
        in_pieces.feed(WHOLE[start:end])
    assert in_pieces.progress == at_once.progress


def test_byte_by_byte_is_the_same_too() -> None:
    at_once, in_pieces = TrainingLog(Path("output.log")), TrainingLog(Path("output.log"))
    at_once.feed(WHOLE)
    for index in range(len(WHOLE)):
        in_pieces.feed(WHOLE[index : index + 1])
    assert in_pieces.progress == at_once.progress


def test_the_pace_leaves_out_the_step_that_saved_a_checkpoint_and_knows_fast_steps() -> None:
    slow = [(step, f"{10 * step // 60:02d}:{10 * step % 60:02d}") for step in range(1, 6)]
    saved = [(6, "11:00"), (7, "11:10")]
    assert read("".join(bar(step, at) for step, at in slow + saved)).seconds_per_step == 10.0
    fast = "".join(bar(step, f"00:{step // 4:02d}") for step in range(1, 41))
    pace = read(fast).seconds_per_step
    assert pace is not None
    assert 0.1 < pace < 0.4
