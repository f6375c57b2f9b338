"""Golden scripts, one per field, and the rendered script run by bash itself."""

import contextlib
import json
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm.errors import InvalidJobSpec
from slurm.folder import ExitRecord, JobFolder
from slurm.local_supervisor import stat
from slurm.script import format_time, quote, render
from slurm.spec import JobSpec
from tests.slurm.conftest import bash, eventually, record, spec

GOLDEN = Path(__file__).parent / "golden"
FOLDER = JobFolder("/fsx/runs/r1/jobs/train-1")
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "payload": {"payload": ("python", "-m", "a b", "it's", "$(id)", "x\r\n#SBATCH --wrap=id", "日本", "")},
    "env": {"env": {"B": "", "A": "a'b\"c\n$HOME;`id`\\", "C": "@CWD@ @COMMAND@"}},
    "activate": {"activate": "/opt/my env/bin/activate", "environment": "toolchain"},
    "cwd": {"cwd": "/fsx/it's here"},
    "per-task": {"per_task": True, "nodes": 2, "tasks_per_node": 4, "ntasks": 8, "cpus_per_task": 128},
    "partition": {"partition": "trn1,trn2"},
    "nodes": {"nodes": 4},
    "ntasks": {"ntasks": 3},
    "tasks-per-node": {"tasks_per_node": 2},
    "cpus-per-task": {"cpus_per_task": 128},
    "time": {"time": "30:00:00"},
    "memory": {"memory": "480G"},
    "nodelist": {"nodelist": "trn1-[1-4],trn1-9"},
    "exclude": {"exclude": "trn1-7"},
    "exclusive": {"exclusive": True},
    "dependency": {"dependency": "afterok:12:13"},
    "mail": {"mail_type": "END,FAIL", "mail_user": "me@example.org"},
    "account": {"account": "research"},
    "qos": {"qos": "high"},
    "reservation": {"reservation": "course"},
    "constraint": {"constraint": "trn1&efa"},
    "requeue": {"requeue": True},
    "no-requeue": {"requeue": False},
    "signal": {"signal": "B:USR1@300"},
    "array": {"array": "0-3%2"},
}


@pytest.mark.parametrize("case", FIELDS)
def test_golden(case: str) -> None:
    """UPDATE_GOLDEN=1 rewrites the files; read the difference before committing it."""
    text = render(JobSpec(**({"payload": ("true",), "environment": "project"} | FIELDS[case])), FOLDER, "3fa8-train-1")
    path = GOLDEN / f"{case}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_a_folder_name_is_quoted_for_slurm_and_for_bash() -> None:
    text = render(spec(), JobFolder("/fsx/it's 100%j/jobs/a"), "n")
    assert "#SBATCH --output='/fsx/it'\"'\"'s 100%%j/jobs/a/output.log'\n" in text
    assert "job_folder='/fsx/it'\"'\"'s 100%j/jobs/a'\n" in text


@pytest.mark.parametrize("path", ["/a\nb", "/a\\b", "/a\x1bb"])
def test_a_folder_name_that_slurm_would_misread_is_refused(path: str) -> None:
    with pytest.raises(InvalidJobSpec, match="folder"):
        render(spec(), JobFolder(path), "n")


def test_no_value_starts_a_line() -> None:
    """Neither a directive nor a CR LF (sbatch refuses the script) can come from a value."""
    text = render(spec("true", "\n#SBATCH --wrap=id\r\n", env={"A": "\n#SBATCH -p x"}), FOLDER, "n")
    assert "\r" not in text
    assert [line for line in text.splitlines() if "wrap" in line or "-p x" in line] == [
        "    export A=$'\\012#SBATCH -p x'",
        "    exec true $'\\012#SBATCH --wrap=id\\015\\012'",
    ]


@pytest.mark.parametrize("text", ["", "a b", "it's", "\n", "a\x7f\x01b'\\", "$(id)`id`", "日本\n", "\t7", "!x"])
def test_quote_survives_bash(text: str) -> None:
    shown = subprocess.run(["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, check=True).stdout
    assert shown.decode() == text


def test_format_time() -> None:
    assert format_time(timedelta(days=3, seconds=1, milliseconds=1)) == "3-00:00:02"


class Run:
    """The script run by bash as slurmstepd would, without any scheduler."""

    def __init__(self, folder: JobFolder, spec: JobSpec, **variables: str) -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.script.write_text(render(spec, folder, "n", launcher=()), encoding="utf-8")
        self.folder = folder
        # No HOME, no USER, no LANG: as much as --export=NIL leaves.
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "HOSTNAME": "n1"}
        with folder.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["/bin/bash", folder.script], env=env | variables, stdout=log, stderr=log, start_new_session=True
            )

    def end(self) -> ExitRecord:
        code = self.process.wait(30)
        ended = self.folder.read_exit()
        assert ended is not None
        assert ended.code == code
        return ended

    @property
    def log(self) -> str:
        return self.folder.log.read_text(encoding="utf-8")

    def logged(self, text: str) -> None:
        eventually(lambda: text in self.log, f"{text!r} in the log")


def test_a_good_end(folder: JobFolder) -> None:
    ended = Run(folder, spec("true")).end()
    assert (ended.code, ended.signal, ended.job_id, ended.nodes, ended.node) == (0, None, "7", "n[1-2]", "n1")
    start = folder.read_start()
    assert start is not None
    assert start.started == ended.started <= ended.ended


@pytest.mark.parametrize(
    ("script", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("sleep 0.1; exit 255", 255)]
)
def test_a_bad_end(folder: JobFolder, script: str, code: int) -> None:
    ended = Run(folder, bash(script)).end()
    assert (ended.code, ended.signal) == (code, None)


def test_a_missing_payload(folder: JobFolder) -> None:
    run = Run(folder, spec("no-such-program"))
    assert run.end().code == 127
    assert "no-such-program" in run.log


def test_a_missing_activation_file(folder: JobFolder) -> None:
    run = Run(folder, spec("true", activate="/nowhere/it's/activate"))
    assert run.end().code == 78
    assert "job script: the activation file /nowhere/it's/activate is not there" in run.log


def test_a_missing_working_folder(folder: JobFolder) -> None:
    run = Run(folder, spec("true", cwd="/nowhere"))
    assert run.end().code == 78
    assert "job script: the working folder is not there" in run.log


def test_an_activation_file_that_exits_cannot_skip_the_records(folder: JobFolder, tmp_path: Path) -> None:
    activate = tmp_path / "activate"
    activate.write_text("echo activated; exit 5")
    assert Run(folder, spec("true", activate=str(activate))).end().code == 5


def test_the_payload_gets_environment_activation_and_folder(folder: JobFolder, tmp_path: Path) -> None:
    activate = tmp_path / "activate it"
    activate.write_text('declare -x FROM_FILE="$GIVEN!"\nfalse')
    nasty = "a'b\"c\n$(id);`id`\\\x1b日本"
    where = tmp_path / "it's here"
    where.mkdir()
    payload = 'printf "%s|" "$GIVEN" "$FROM_FILE" "$PWD" "$HOME" "$USER" "$LANG" "${SLURM_EXPORT_ENV-unset}" "$1"'
    run = Run(
        folder,
        spec("bash", "-c", payload, "-", nasty, env={"GIVEN": nasty}, activate=str(activate), cwd=str(where)),
        SLURM_EXPORT_ENV="NIL",
    )
    assert run.end().code == 0
    got = run.log.splitlines(keepends=True)
    assert got[0].endswith("returned 1; going on\n")
    home, user = str(Path.home()), subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    assert "".join(got[1:]) == "|".join([nasty, nasty + "!", str(where), home, user, "C.UTF-8", "unset", nasty, ""])


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("INT", 130), ("HUP", 129), ("USR1", 138), ("USR2", 140)])
def test_a_signal_reaches_the_whole_payload_and_is_recorded(folder: JobFolder, name: str, code: int) -> None:
    run = Run(folder, bash("bash -c 'echo ready; sleep 600; echo no'; echo no"))
    run.logged("ready")
    run.process.send_signal(signal.Signals[f"SIG{name}"])
    ended = run.end()
    assert (ended.code, ended.signal) == (code, signal.Signals[f"SIG{name}"])
    assert "no" not in run.log.splitlines()


@pytest.mark.parametrize("round_", range(5))
def test_a_signal_to_everything_at_once_keeps_the_code(folder: JobFolder, round_: int) -> None:
    """As scancel does it. Bash 5.2 loses the status of a child that dies while `wait` is interrupted."""
    run = Run(folder, bash("trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"))
    run.logged("ready")
    for pid in [run.process.pid, *descendants(run.process.pid)][:: 1 if round_ % 2 else -1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    ended = run.end()
    assert ended.code == 7
    # told last, the script may have seen the payload's end before the signal
    assert ended.signal == 15 or (ended.signal is None and round_ % 2 == 0)
    assert sorted(path.name for path in folder.path.iterdir()) == ["exit.json", "output.log", "script.sh", "start.json"]


def descendants(pid: int) -> list[int]:
    children = [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if (fields := stat(int(entry.name))) and int(fields[1]) == pid
    ]
    return [*children, *(found for child in children for found in descendants(child))]


def test_a_payload_may_take_its_time_to_end(folder: JobFolder) -> None:
    run = Run(folder, bash("trap 'sleep 0.3; echo saved; exit 9' TERM; echo ready; while :; do sleep 0.05; done"))
    run.logged("ready")
    run.process.terminate()
    assert (run.end().code, "saved" in run.log) == (9, True)


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("USR1", 0)])
def test_a_good_end_after_being_told_to_end_is_no_success(folder: JobFolder, name: str, code: int) -> None:
    run = Run(folder, bash(f"trap 'exit 0' {name}; echo ready; while :; do sleep 0.05; done"))
    run.logged("ready")
    run.process.send_signal(signal.Signals[f"SIG{name}"])
    assert run.end().code == code


def test_a_second_signal_and_a_checkpoint_signal_do_not_confuse_it(folder: JobFolder) -> None:
    run = Run(
        folder,
        bash(
            "trap 'echo saved' USR1; trap 'echo term' TERM; echo ready; for i in {1..20}; do sleep 0.05; done; exit 4"
        ),
    )
    run.logged("ready")
    run.process.send_signal(signal.SIGUSR1)
    run.logged("saved")
    run.process.terminate()
    assert (run.end().code, run.log.count("saved")) == (4, 1)


def test_a_stopped_and_continued_payload_is_still_waited_for(folder: JobFolder) -> None:
    """Slurm suspends jobs with SIGSTOP; a shell with job control would take that for an end."""
    run = Run(folder, bash("echo ready $$; for i in {1..10}; do sleep 0.05; done; exit 6"))
    run.logged("ready")
    payload = int(run.log.split()[1])
    os.kill(payload, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{payload}/stat").read_text().rpartition(")")[2].split()[0] == "T", "stopped")
    os.kill(payload, signal.SIGCONT)
    assert run.end().code == 6


def test_a_requeued_job_moves_the_older_exit_file_aside(folder: JobFolder) -> None:
    assert Run(folder, bash("exit 3")).end().restart_count == 0
    second = Run(folder, bash("test ! -e exit.json && exit 4"), SLURM_RESTART_COUNT="1").end()
    assert (second.code, second.restart_count) == (4, 1)
    assert record(folder.path / "exit.before-1.json")["code"] == 3


def test_the_log_shows_where_a_later_start_begins(folder: JobFolder) -> None:
    """It is appended to, and what ended an earlier start must not explain this one."""
    run = Run(folder, bash("true"))
    run.end()
    assert "job script: start" not in run.log
    again = Run(folder, bash("exit 4"), SLURM_RESTART_COUNT="2")
    job_id = again.end().job_id
    assert f"job script: start 2 of job {job_id}\n" in again.log


def test_records_are_json_whatever_the_values(folder: JobFolder) -> None:
    nasty = 'a"b\\c\nd\x01é$(id)'
    run = Run(folder, spec("true"), SLURM_JOB_NODELIST=nasty, SLURM_RESTART_COUNT="a[$(id)]", HOSTNAME=nasty)
    run.end()
    data = json.loads(folder.exit.read_text(encoding="ascii"))
    assert (data["nodes"], data["restart_count"]) == ('a"b\\c?d???$(id)', 0)


def test_array_tasks_keep_their_records_apart(folder: JobFolder) -> None:
    run = Run(folder, spec("true", array="0-3"), SLURM_ARRAY_TASK_ID="2")
    run.process.wait(30)
    assert record(folder.path / "exit-2.json")["code"] == 0
    assert not folder.exit.exists()


def test_an_unwritable_folder_is_said_and_the_code_kept(folder: JobFolder) -> None:
    run = Run(folder, bash("rm start.json; mkdir exit.json.tmp; exit 3"))
    assert run.process.wait(30) == 3
    assert f"job script: could not write {folder.exit}" in run.log
    assert folder.read_exit() is None
