"""The compile stage succeeded only if everything says so."""

import json
from pathlib import Path

import pytest

from trainium.logs.compile_gate import CompileVerdict, compile_gate

WRAPPER = "2025-06-25 05:58:16.000194: 58408 {level} ||NEURON_PARALLEL_COMPILE||: {text}"
NEW = "2026-04-13 01:46:33.000003: 837617 [{level}]: {text}"
NOTHING_TO_DO = "No todo hlos found in cache or hlo_tasklist, parallel_compile return before spawning workers...."


def summary(total: int, failed: int = 0, form: str = WRAPPER) -> str:
    lines = (
        f"Total graphs: {total}",
        f"Total successful compilations: {total - failed}",
        f"Total failed compilations: {failed}",
    )
    return "".join(form.format(level="INFO", text=line) + "\n" for line in lines)


class Job:
    """A folder with what a compile job leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "output.log"
        self.results = folder / "results"
        self.cache = folder / "cache"
        self.results.mkdir()
        self.log.write_text("")

    def say(self, text: str) -> "Job":
        with self.log.open("a") as file:
            file.write(text if text.endswith("\n") else text + "\n")
        return self

    def module(self, number: int, neff: bytes | None = b"neff") -> str:
        name = f"MODULE_{number}+d41d8cd9"
        folder = self.cache / "neuronxcc-2.13.66.0+6dfecc895" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.hlo_module.pb").write_bytes(b"hlo")
        if neff is not None:
            (folder / "model.neff").write_bytes(neff)
        return name

    def report(self, graphs: dict[int, object]) -> dict[str, object]:
        entries = {
            f"/fsx/cache/neuronxcc-2/MODULE_{n}+d41d8cd9/model.hlo_module.pb": entry for n, entry in graphs.items()
        }
        return {"compilation_summary": {"true": len(graphs)}, "compilation_report": entries, "start_time": 1.0}

    def dump(self, graphs: dict[int, object], name: str = "total_neuron_parallel_compile_results_1.json") -> None:
        (self.results / name).write_text(json.dumps(self.report(graphs)))

    def verdict(self, nodes: int = 1) -> CompileVerdict:
        return compile_gate(self.log, nodes=nodes, results=self.results, cache=self.cache)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def rules(verdict: CompileVerdict) -> list[str]:
    return [finding.rule for finding in verdict.findings]


@pytest.mark.parametrize("form", [WRAPPER, NEW])
def test_a_good_compilation(job: Job, form: str) -> None:
    job.say(summary(2, form=form))
    for number in (1, 2):
        job.module(number)
    job.dump({n: {"status": True, "retry": 0, "compile_time": 9.5} for n in (1, 2)})
    verdict = job.verdict()
    assert verdict.ok
    assert (verdict.total, verdict.failed, verdict.cached, verdict.seconds, verdict.findings) == (2, 0, False, 19.0, ())
    assert [(g.module, g.seconds, g.ok, g.neff_bytes) for g in verdict.graphs] == [
        ("MODULE_1+d41d8cd9", 9.5, True, 4),
        ("MODULE_2+d41d8cd9", 9.5, True, 4),
    ]
    assert "2 graphs compiled" in verdict.summary


def test_the_report_in_the_log_serves_when_none_was_dumped(job: Job) -> None:
    job.module(1)
    job.say("0: " + json.dumps(job.report({1: {"status": True, "retry": 0}})) + "\n" + summary(1))
    verdict = job.verdict()
    assert verdict.ok
    assert [(g.module, g.seconds) for g in verdict.graphs] == [("MODULE_1+d41d8cd9", None)]


def test_the_dumped_report_is_preferred(job: Job) -> None:
    job.module(1)
    job.say(json.dumps(job.report({1: {"status": True, "compile_time": 1.0}})) + "\n" + summary(1))
    job.dump({1: {"status": True, "compile_time": 2.0}}, "neuron_parallel_compile_results_1.json")
    assert job.verdict().seconds == 2.0
    job.dump({1: {"status": True, "compile_time": 3.0}})
    assert job.verdict().seconds == 3.0
    (job.results / "total_neuron_parallel_compile_results_2.json").write_text("{half")
    assert job.verdict().seconds == 3.0


def test_text_alone_needs_as_many_neffs_as_graphs(job: Job) -> None:
    job.say(summary(2))
    job.module(1)
    assert rules(job.verdict()) == ["neff-missing"]
    job.module(2)
    assert job.verdict().ok
    assert job.verdict().total == 2


def test_only_the_latest_start_of_a_requeued_job_counts(job: Job) -> None:
    job.module(1)
    ended = "slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 2026-12-01T01:31:20 DUE TO JOB REQUEUE ***"
    job.say(WRAPPER.format(level="INFO", text="Total graphs: 7")).say(ended)
    assert not job.verdict().ok
    job.say("job script: start 1 of job 2").say(summary(1))
    verdict = job.verdict()
    assert verdict.ok, verdict.findings
    assert verdict.total == 1


def test_every_node_must_report(job: Job) -> None:
    for number in range(8):
        job.module(number)
    job.say(summary(2))
    assert rules(job.verdict(nodes=2)) == ["summary-missing"]
    job.say(summary(8))
    assert job.verdict(nodes=2).ok


def test_interleaved_summaries_of_two_nodes(job: Job) -> None:
    lines = [line for pair in zip(summary(2).splitlines(), summary(8).splitlines(), strict=True) for line in pair]
    for number in range(8):
        job.module(number)
    job.say("".join(f"{i % 2}: {line}\n" for i, line in enumerate(lines)))
    assert job.verdict(nodes=2).ok


def test_the_log_of_an_expected_node_is_missing(job: Job, tmp_path: Path) -> None:
    job.say(summary(1))
    job.module(1)
    verdict = compile_gate([job.log, tmp_path / "node1.log"], nodes=2, cache=job.cache)
    assert rules(verdict) == ["log-missing", "summary-missing"]


def test_failed_graphs(job: Job) -> None:
    job.module(1)
    job.module(2, neff=None)
    job.say("ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile']: [NLA001] boom")
    job.say(summary(2, failed=1))
    job.dump({1: {"status": True, "compile_time": 1.0}, 2: {"status": False, "compile_time": 2.0}})
    verdict = job.verdict()
    assert not verdict.ok
    assert (verdict.total, verdict.failed) == (2, 1)
    assert set(rules(verdict)) == {"compile-failed", "compile-failures-counted", "graphs-failed"}
    assert any("boom" in finding.summary for finding in verdict.findings)


def test_a_report_of_failures_beats_a_text_without(job: Job) -> None:
    job.module(1)
    job.say(summary(1))
    job.dump({1: {"status": False}})
    assert rules(job.verdict()) == ["graphs-failed"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (WRAPPER.format(level="INFO", text="sub-process 1 got exception: None"), "compile-worker-crash"),
        ("INFO ||NCC_WRAPPER||: Got a cached failed neff at /c/MODULE_1+d41d8cd9/model.neff", "cached-failure"),
        (
            "2025-Mar-27 17:23:42.108556 65653:71175 ERROR TDRV:tensor_allocate Failed to allocate 194641920 bytes on"
            " DEVICE for tensor UNKNOWN.",
            "device-memory",
        ),
        (
            "2025-Mar-20 16:39:45.094874 158738:163246 ERROR ENC:ncclInitComm failed neuronInitComm request to NCCL",
            "collectives-broke",
        ),
        (
            "2025-Jan-27 14:44:32.234379 199555:200462 ERROR NMGR:kmgr_load_nn_internal_v2 Failed to stage graph:"
            " kelf-0.json to NeuronCore",
            "graph-load-failed",
        ),
        ("Killed", "host-memory"),
        ("2025-Mar-27 17:23:42.108556 65653:71175 ERROR  NRT:nrt_odd   nobody has seen this", "unknown-error"),
        (NEW.format(level="ERROR", text="nobody has seen this"), "unknown-error"),
    ],
)
def test_one_hidden_failure_fails_a_summary_that_looks_good(job: Job, line: str, rule: str) -> None:
    job.module(1)
    job.say(line + "\n" + summary(1))
    verdict = job.verdict()
    assert not verdict.ok
    assert rules(verdict) == [rule]


@pytest.mark.parametrize(
    "line",
    [
        "Another process must be compiling MODULE_1+d41d8cd9, been waiting for: 3.0 minutes",
        "2025-Jan-03 21:00:33.247541 13423:13423 ERROR   NRT:nrt_close   Unexpected runtime state: NRT_STATE_START",
        "2023-Aug-17 22:53:01.0674 47940:47940 ERROR  TDRV:tdrv_get_dev_info   No neuron device available",
        "Epoch 0: 1/80 [00:05<?, ?it/s, loss=nan, reduced_train_loss=nan, global_step=1.000]",
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nEOFError: Ran out of input',
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nRuntimeError: survived',
    ],
)
def test_what_a_good_compilation_may_print(job: Job, line: str) -> None:
    job.module(1)
    job.say(line + "\n" + summary(1))
    assert job.verdict().ok


def test_everything_was_cached(job: Job) -> None:
    job.module(1)
    job.module(2)
    job.say("INFO ||NEURON_CC_WRAPPER||: Using a cached neff at /c/neuronxcc-2/MODULE_1+d41d8cd9/model.neff. Exiting")
    job.say(WRAPPER.format(level="INFO", text=NOTHING_TO_DO))
    verdict = job.verdict()
    assert (verdict.ok, verdict.cached) == (True, True)
    assert [g.module for g in verdict.graphs] == ["MODULE_1+d41d8cd9"]
    assert "cached" in verdict.summary


def test_a_cached_graph_must_have_its_neff(job: Job) -> None:
    job.module(1, neff=b"")
    job.say("INFO ||NEURON_CC_WRAPPER||: Using a cached neff at /c/neuronxcc-2/MODULE_1+d41d8cd9/model.neff. Exiting")
    job.say(NOTHING_TO_DO)
    assert rules(job.verdict()) == ["neff-missing"]


def test_nothing_was_extracted(job: Job) -> None:
    job.say(WRAPPER.format(level="INFO", text=NOTHING_TO_DO))
    assert rules(job.verdict()) == ["nothing-extracted"]
    assert rules(compile_gate(job.log)) == ["cache-not-visible"]


def test_zero_graphs_are_no_success(job: Job) -> None:
    job.module(1)
    job.say(summary(0))
    assert rules(job.verdict()) == ["nothing-extracted"]


def test_a_graph_without_neff(job: Job) -> None:
    job.module(1)
    job.module(2, neff=None)
    job.say(summary(2))
    job.dump({1: {"status": True}, 2: {"status": True}})
    verdict = job.verdict()
    assert rules(verdict) == ["neff-missing"]
    assert "MODULE_2+d41d8cd9" in verdict.findings[0].summary
    assert [g.neff_bytes for g in verdict.graphs] == [4, None]


def test_a_cache_that_the_job_did_not_use(job: Job) -> None:
    job.say(summary(1))
    verdict = job.verdict()
    assert rules(verdict) == ["neff-missing"]
    assert "--cache_dir" in verdict.findings[0].action or "cache" in verdict.findings[0].action


def test_an_empty_log_proves_nothing(job: Job) -> None:
    assert rules(job.verdict()) == ["summary-missing"]


def test_a_failed_trial_run_names_the_exception(job: Job) -> None:
    job.say('Traceback (most recent call last):\n  File "/h/t.py", line 9, in main\nValueError: tp 5')
    job.say(WRAPPER.format(level="ERROR", text="There was an error in the training script."))
    verdict = job.verdict()
    assert rules(verdict) == ["python-mistake", "trial-run-failed", "summary-missing"]
    assert "ValueError: tp 5" in verdict.findings[0].summary
