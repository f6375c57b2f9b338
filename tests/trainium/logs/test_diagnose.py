"""Whole logs of failed jobs: the root cause comes first, with evidence, among thousands of harmless lines."""

import random
from pathlib import Path

import pytest
import yaml

from trainium.logs.diagnose import diagnose, find
from trainium.logs.rules import BY_ID, Context, Role, RuleClass, Scope
from trainium.logs.scanner import Scanner

SAMPLES = yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text())
NOISE = [
    "2025-06-25 04:05:43.000787: 75652 INFO ||NEURON_CC_WRAPPER||: Call compiler with cmd: neuronx-cc compile x.pb",
    "2025-06-25 04:05:43.000787: 75652 INFO ||NEURON_CACHE||: Compile cache path: /cache",
    "[2025-06-25 01:18:33.326: I neuronx_distributed/parallel_layers/parallel_state.py:592] > initializing tensor",
    "[NeMo I 2025-06-25 01:18:26 nlp_overrides:940] NLPTrainer: Initializing trainer with parameters: ",
    "Map: 100%|##########| 12008/12008 [00:12<00:00, 952.95 examples/s]",
    "Epoch 0:   3%|x| 3/91 [16:05<7:52:06, 321s/it, loss=nan, reduced_train_loss=13.40, lr=7e-9, global_step=1.000]",
    "................Compiler status PASS",
    "2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total failed compilations: 0",
    "an error handler was installed; errors: 0",
]
BENIGN = [
    line
    for name, sample in SAMPLES.items()
    if BY_ID[name].cls is RuleClass.BENIGN and BY_ID[name].scope is not Scope.TRIAL_RUN
    for line in sample["positive"]
]


def noisy(*lines: str, seed: int = 0, around: int = 1000) -> str:
    """The lines, in their order, with harmless ones before, between and behind them."""
    choice = random.Random(seed)
    out: list[str] = []
    for line in [*lines, None]:
        out += [choice.choice(NOISE) for _ in range(around)]
        if line is not None:
            out.append(line)
    return "\n".join(out) + "\n"


def write(folder: Path, text: str, name: str = "output.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_harmless_lines_give_nothing(tmp_path: Path) -> None:
    lines = [*BENIGN, *NOISE] * 20
    random.Random(1).shuffle(lines)
    assert find(write(tmp_path, "\n".join(lines)), Context("convert")) == ()


FAILURES = [
    name
    for name in SAMPLES
    if BY_ID[name].is_failure and BY_ID[name].scope is not Scope.EXCEPTION and BY_ID[name].role is not Role.HINT
]


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_is_found_in_a_long_log(name: str, tmp_path: Path) -> None:
    rule = BY_ID[name]
    line = SAMPLES[name]["positive"][0]
    stage = rule.stages[0] if rule.stages else "compile"
    nodes = 2 if rule.scope is Scope.SEVERAL_NODES else 1
    text = noisy(line, around=300).replace("Total failed compilations: 0", "Total graphs: 1")
    first, *_ = diagnose(write(tmp_path, text), stage, nodes=nodes, expect_resume=True)
    assert (first.rule, first.cls, first.count) == (name, rule.cls, 1)
    assert first.evidence[0].line == 301
    assert first.action


def test_the_first_failing_rank_is_the_root_and_the_rest_is_collateral(tmp_path: Path) -> None:
    text = noisy(
        "[rank3]: Traceback (most recent call last):",
        '[rank3]:   File "/env/lib/python3.10/site-packages/lightning/pytorch/trainer/trainer.py", line 538, in fit',
        '[rank3]:   File "/home/me/neuronx-distributed-training/examples/training_orchestrator.py", line 71, in train',
        "[rank5]: unrelated",
        '[rank3]:   File "/env/lib/python3.10/site-packages/torch/nn/modules/module.py", line 1511, in _call_impl',
        "[rank3]: ValueError: token id 70000 is outside of the vocabulary",
        "2025-06-25 01:30:00.1 1:2 ERROR TDRV:x (FATAL-RT-UNDEFINED-STATE) missing collectives status on Neuron",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 8159 closing signal SIGTERM",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 8160 closing signal SIGTERM",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 3 (pid: 8158)",
        around=50,
    )
    found = diagnose(write(tmp_path, text), "train")
    root = found[0]
    assert (root.rule, root.cls) == ("python-mistake", RuleClass.DETERMINISTIC)
    assert "ValueError: token id 70000 is outside of the vocabulary" in root.summary
    assert "training_orchestrator.py:71 in train" in root.summary
    assert root.evidence[0].rank == 3
    assert [d.rule for d in found[1:]] == ["execution-hang", "sigterm", "process-failed"]
    assert found[2].count == 2


def test_a_traceback_is_not_a_second_finding_where_a_rule_knows_its_exception(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in main\n    go()\n'
        "AssertionError: Found shared weight embed has None grad\n"
    )
    (found,) = diagnose(write(tmp_path, text), "train")
    assert found.rule == "tied-weights-pipeline"
    assert "/home/me/train.py:9 in main" in found.summary


def test_the_same_exception_of_many_ranks_is_one_diagnosis(tmp_path: Path) -> None:
    text = "".join(
        f'{rank}: Traceback (most recent call last):\n{rank}:   File "/h/t.py", line 9, in main\n{rank}: KeyError: 4\n'
        for rank in range(32)
    )
    (found,) = diagnose(write(tmp_path, text), "train")
    assert (found.count, [place.rank for place in found.evidence]) == (32, [0, 1, 2])


def test_interleaved_tracebacks_do_not_mix(tmp_path: Path) -> None:
    text = (
        "0: Traceback (most recent call last):\n1: Traceback (most recent call last):\n"
        '0:   File "/h/a.py", line 1, in a\n1:   File "/h/b.py", line 2, in b\n'
        "1: TypeError: b\n0: ValueError: a\n"
    )
    summaries = [d.summary for d in diagnose(write(tmp_path, text), "train")]
    assert any("TypeError: b (at /h/b.py:2 in b)" in s for s in summaries)
    assert any("ValueError: a (at /h/a.py:1 in a)" in s for s in summaries)


def test_a_cause_wins_over_an_earlier_consequence(tmp_path: Path) -> None:
    text = noisy(
        "F ./torch_xla/csrc/runtime/debug_macros.h:20] Non-OK-status: INTERNAL: RunNeuronCCImpl: error condition",
        "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory.",
        around=20,
    )
    assert diagnose(write(tmp_path, text), "compile")[0].rule == "compiler-host-memory"


def test_across_nodes_the_earliest_time_is_first(tmp_path: Path) -> None:
    late = write(tmp_path, "2025-Mar-10 18:51:19.0739 1:2 ERROR TDRV:a Could not open the nd0\n", "a.log")
    early = write(
        tmp_path, "x\ny\n2025-Mar-10 18:40:00.0739 1:2 ERROR TDRV:b DMA TX engine 0 is in an abort state\n", "b.log"
    )
    found = diagnose([late, early], "train", nodes=2)
    assert [d.rule for d in found] == ["hardware", "device-unusable"]
    assert found[0].first == "2025-Mar-10 18:40:00.0739"


def test_benign_in_the_trial_run_only(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nEOFError: Ran out of input\n'
    )
    assert find(path, Context("compile")) == ()
    assert [d.rule for d in find(path, Context("train"))] == ["python-exception"]


def test_an_unknown_failure_is_reported_with_the_last_lines(tmp_path: Path) -> None:
    (found,) = diagnose(write(tmp_path, "one\ntwo\r two again\nbye hf_abcdefghijklmnop\n"), "train")
    assert (found.rule, found.cls) == ("unrecognised", RuleClass.AMBIGUOUS)
    assert [place.text for place in found.evidence] == ["one", " two again", "bye [redacted: Hugging Face token]"]
    assert "exit.json" in found.action
    (found,) = diagnose(tmp_path / "none.log", "train")
    assert "without a log" in found.summary
    (found,) = diagnose(write(tmp_path, ""), "train")
    assert "empty" in found.summary


def test_jobs_of_a_stage_and_other_names_are_read_too(tmp_path: Path) -> None:
    path = write(tmp_path, "AttributeError: 'NoneType' object has no attribute 'keys'\n")
    for stage in ("convert", "convert-verify", "publish", None):
        assert diagnose(path, stage)[0].rule == "converter-no-weights"


def test_a_hint_alone_does_not_explain(tmp_path: Path) -> None:
    path = write(tmp_path, "Another process must be compiling MODULE_1+a, been waiting for: 40.0 minutes\n")
    assert [d.rule for d in diagnose(path, "compile")] == ["unrecognised", "compile-lock-wait"]


def test_evidence_is_redacted(tmp_path: Path) -> None:
    text = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0123456789abcdef0 AWS_SESSION_TOKEN=abc action=X\n"
    shown = str(diagnose(write(tmp_path, text), "train")[0])
    assert "i-0123456789abcdef0" not in shown
    assert "abc" not in shown
    assert "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR" in shown


def test_bytes_that_are_no_text_and_very_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"\xff\xfe\x00\n" + b"." * 5_000_000 + b"[F137] neuronx-cc was forcibly killed" + b"." * 3_000_000)
    (found,) = diagnose(path, "compile")
    assert (found.rule, found.count, found.evidence[0].line) == ("compiler-host-memory", 1, 2)
    assert len(found.evidence[0].text) < 700


@pytest.mark.parametrize("cut", range((1 << 20) - 60, (1 << 20) + 20, 7))
def test_a_message_at_the_cut_of_a_long_line_is_counted_once(cut: int) -> None:
    scanner = Scanner(Context("compile"))
    scanner.feed(b"." * cut + b" [F137] neuronx-cc was killed " + b"." * 2_000_000 + b"\n")
    assert [f.count for f in scanner.findings.values()] == [1]
