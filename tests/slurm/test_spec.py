from datetime import timedelta

import pytest

from slurm.errors import InvalidJobSpec
from slurm.spec import JobSpec, check_name

HOSTILE = [
    "",
    "a b",
    "a\n#SBATCH --output=/root/.ssh/authorized_keys",
    "a\n",
    "a\r\nb",
    "-a",
    "--wrap=id",
    "a;id",
    "$(id)",
    "`id`",
    "a'b",
    'a"b',
    "a#b",
    "a\\b",
    "a\tb",
    "a\0b",
    "a\x1bb",
    "日本",
    "nœud",
    "a\u2028b",
    "../../etc/passwd",
    "/etc/passwd",
]
TEXT_FIELDS = [
    "partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "memory", "dependency",
    "mail_type", "mail_user", "signal", "array", "time",
]  # fmt: skip


@pytest.mark.parametrize("field", TEXT_FIELDS)
@pytest.mark.parametrize("value", HOSTILE)
def test_a_directive_takes_nothing_that_slurm_could_misread(field: str, value: str) -> None:
    with pytest.raises(InvalidJobSpec) as caught:
        JobSpec(payload=("true",), environment="project", **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value) in str(caught.value)
    assert "write" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "trn1"),
        ("partition", "trn1,trn2-spot"),
        ("account", "lab.nlp"),
        ("constraint", "[trn1&efa]|trn2*2"),
        ("constraint", "(efa|ib)&trn1"),
        ("nodelist", "trn1-[1-4,7],head"),
        ("exclude", "queue1-dy-trn1-32xlarge-[1-16]"),
        ("memory", "0"),
        ("memory", "480G"),
        ("dependency", "afterok:12:13,afterany:14"),
        ("dependency", "singleton"),
        ("mail_type", "END,FAIL,TIME_LIMIT_80"),
        ("mail_user", "ml-team+jobs@example.org"),
        ("signal", "B:USR1@300"),
        ("signal", "SIGTERM@60"),
        ("array", "0-15:2,20%4"),
        ("requeue", False),
        ("ntasks", 64),
    ],
)
def test_usual_values_pass(field: str, value: object) -> None:
    spec = JobSpec(payload=("true",), environment="project", **{field: value})  # type: ignore[arg-type]
    assert getattr(spec, field) == value


@pytest.mark.parametrize("field", ["nodes", "ntasks", "tasks_per_node", "cpus_per_task"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", "1 --wrap=id"])
def test_counts_are_whole_numbers_from_one(field: str, value: object) -> None:
    with pytest.raises(InvalidJobSpec, match=field):
        JobSpec(payload=("true",), environment="project", **{field: value})  # type: ignore[arg-type]


def test_fewer_tasks_than_nodes_is_refused_because_slurm_would_drop_nodes() -> None:
    with pytest.raises(InvalidJobSpec, match="nodes=1"):
        JobSpec(payload=("true",), environment="project", nodes=2, ntasks=1)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("04:00:00", timedelta(hours=4)),
        ("2-01:02:03", timedelta(days=2, hours=1, minutes=2, seconds=3)),
        ("120:00:00", timedelta(days=5)),
        (timedelta(minutes=5), timedelta(minutes=5)),
    ],
)
def test_time_becomes_a_timedelta(text: str | timedelta, limit: timedelta) -> None:
    assert JobSpec(payload=("true",), environment="project", time=text).time_limit == limit


@pytest.mark.parametrize("value", ["90", "4h", "00:00:00", "1:99:00", timedelta(0), timedelta(seconds=-5), 3600])
def test_other_times_are_refused(value: object) -> None:
    with pytest.raises(InvalidJobSpec, match="time"):
        JobSpec(payload=("true",), environment="project", time=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["", "1A", "A-B", "A B", "A=B", "A\nB", "é", "SLURM_CONF", "SBATCH_OUTPUT", "SRUN_X", "UID", "A;id"]
)
def test_environment_names_are_identifiers_that_are_free(name: str) -> None:
    with pytest.raises(InvalidJobSpec, match="env"):
        JobSpec(payload=("true",), environment="project", env={name: "x"})


def test_environment_values_are_any_text_but_nul() -> None:
    values = {"A": "a'b\"c\n$(id);`id`\\ \x1b日本", "B": ""}
    assert JobSpec(payload=("true",), environment="project", env=values).env == values
    with pytest.raises(InvalidJobSpec, match="NUL"):
        JobSpec(payload=("true",), environment="project", env={"A": "\0"})
    with pytest.raises(InvalidJobSpec, match="UTF-8"):
        JobSpec(payload=("true",), environment="project", env={"A": "\udcff"})


@pytest.mark.parametrize("field", ["activate", "cwd"])
@pytest.mark.parametrize("value", ["relative", "", "/a/../b", "/a\nb", "/a\0", "~/x"])
def test_paths_are_absolute_and_plain(field: str, value: str) -> None:
    with pytest.raises(InvalidJobSpec, match=field):
        JobSpec(payload=("true",), environment="project", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("payload", [(), "echo hi", ("",), ("-c",), ("a", "\0"), ("a", 1)])
def test_payload_is_an_argv(payload: object) -> None:
    with pytest.raises(InvalidJobSpec, match="payload"):
        JobSpec(payload=payload, environment="project")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "-a", "a b", "a,b", "a/b", "a\n", "é", "a" * 129, "%j"])
def test_a_job_name_is_one_that_can_be_found_again(name: str) -> None:
    with pytest.raises(InvalidJobSpec, match="name"):
        check_name(name)
