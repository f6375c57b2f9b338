"""What a lab needs before its daemons start: programs, ports, files, a database, and the daemons' command lines."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import config, processes
from .processes import Daemon, SlurmLabError

# Program → the Debian package that brings it.
PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    **dict.fromkeys(("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel", "sacct"), "slurm-client"),
}
ACCOUNTING_PROGRAMS = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-server",
}

DATABASE_BYTES = 512 * 1024**2  # what a fresh database and a session's jobs need at most


def check_requirements(accounting: bool) -> None:
    programs = PROGRAMS | (ACCOUNTING_PROGRAMS if accounting else {})
    missing = {name: package for name, package in programs.items() if shutil.which(name, path=search_path()) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise SlurmLabError(
            f"the Slurm lab misses {', '.join(missing)}. Run {Path(__file__).with_name('install.sh')},"
            f" or install these Debian packages: {packages}"
        )
    if os.geteuid() != 0:
        raise SlurmLabError("the Slurm lab runs slurmd, which must be root: run the tests as root (in a container)")
    _check_host_name()


def _check_host_name() -> None:
    """Slurm's programs, srun too, listen either on the address of the host's name or on all; clients use 127.0.0.1."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nothing"
    if address != "127.0.0.1":
        raise SlurmLabError(
            f"the Slurm lab listens on 127.0.0.1 only, and this host's name {name!r} resolves to {address}."
            f" Put the line '127.0.0.1 {name}' at the top of /etc/hosts"
        )


def search_path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def program(name: str) -> str:
    found = shutil.which(name, path=search_path())
    assert found is not None, name  # check_requirements has seen it
    return found


def database_folder(folder: Path) -> Path:
    """In memory when there is room (a cold start is faster), else in the lab's folder."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free >= DATABASE_BYTES:
        return Path(tempfile.mkdtemp(prefix="tl-", dir=memory))
    return folder / "mysql"


@contextlib.contextmanager
def reserved_ports(*names: str) -> Iterator[dict[str, int]]:
    """A free port per name. Each stays bound, never listening, for as long as the lab lives.

    With SO_REUSEADDR on both sides the daemon can still bind and listen on it, also after a restart, while the kernel
    gives it to nobody else: neither to another lab nor to an outgoing connection.
    """
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in names:
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
            ports[name] = holder.getsockname()[1]
        yield ports


def write_files(
    folder: Path,
    nodes: Sequence[str],
    ports: Mapping[str, int],
    *,
    cpus: int,
    accounting: bool,
    message_timeout: int,
    cloud: Sequence[str],
    extra: str,
) -> None:
    """The key, the folders, and the configuration: slurm.conf is what SLURM_CONF must name."""
    for name in ("run", "log", "state", *(f"spool/{node}" for node in (*nodes, *cloud))):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]  # slurmctld and slurmdbd look for their own name in the files
    _write_private(folder / "run/munge.key", os.urandom(1024))
    conf = config.slurm_conf(
        folder=folder,
        host=host,
        ctld_port=ports["slurmctld"],
        node_ports={node: ports[node] for node in nodes},
        cpus=cpus,
        message_timeout=message_timeout,
        dbd_port=ports["slurmdbd"] if accounting else None,
        cloud_ports={node: ports[node] for node in cloud},
        extra=extra,
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "resume.sh").write_text(config.RESUME_SH)
    (folder / "resume.sh").chmod(0o755)
    (folder / "cgroup.conf").write_text(config.CGROUP_CONF)
    if accounting:
        dbd = config.slurmdbd_conf(folder=folder, host=host, dbd_port=ports["slurmdbd"], sql_port=ports["mariadbd"])
        _write_private(folder / "slurmdbd.conf", dbd.encode())
        (folder / "database.sql").write_text(config.DATABASE_SQL)


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def commands(
    folder: Path, nodes: Sequence[str], cloud: Sequence[str], ports: Mapping[str, int], data: Path | None
) -> dict[str, Daemon]:
    """The daemons by name, in the order of their start.

    slurmctld comes before slurmd: a slurmd that finds no slurmctld tries again only after about 10 s. Each slurmd has
    mounts of its own, so that a node can see a folder otherwise than the head node does.
    """
    daemons = {"munged": _munged(folder / "run")}
    if data:
        daemons["mariadbd"] = _mariadbd(folder, data, ports["mariadbd"])
        daemons["slurmdbd"] = _listener(ports["slurmdbd"], "slurmdbd", "-D")
    daemons["slurmctld"] = _listener(ports["slurmctld"], "slurmctld", "-D")
    for node in (*nodes, *cloud):
        booted = ("-b",) if node in cloud else ()  # else Slurm waits for a slurmd that began after it wanted the node
        slurmd = _listener(ports[node], "slurmd", "-D", *booted, "-N", node)
        daemons[f"slurmd.{node}"] = Daemon((program("unshare"), "--mount", *slurmd.argv), slurmd.ready)
    return daemons


def database_install_command(data: Path) -> tuple[str, ...]:
    return (
        program("mariadb-install-db"),
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
    )


def _listener(port: int, name: str, *arguments: str) -> Daemon:
    return Daemon((program(name), *arguments), lambda: processes.is_listening(port))


def _munged(run: Path) -> Daemon:
    argv = (
        program("munged"),
        "--foreground",
        "--num-threads=10",
        f"--socket={run}/munge.socket",
        f"--key-file={run}/munge.key",
        f"--pid-file={run}/munged.pid",
        f"--seed-file={run}/munged.seed",
    )
    return Daemon(argv, lambda: processes.accepts(run / "munge.socket"))


def _mariadbd(folder: Path, data: Path, port: int) -> Daemon:
    argv = (
        program("mariadbd"),
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        f"--socket={folder}/run/mariadbd.socket",
        f"--pid-file={folder}/run/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--port={port}",
        f"--init-file={folder}/database.sql",
        *config.MARIADBD_OPTIONS,
    )
    client = (program("mariadb"), "--no-defaults", "--protocol=tcp", "-h127.0.0.1", f"-P{port}", "-uslurm", "-pslurm")

    def ready() -> bool:
        """The database and its user come from the init file, so a listening server is not enough."""
        if not processes.is_listening(port):
            return False
        question = (*client, "-e", "select 1", "slurm_acct_db")
        return subprocess.run(question, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

    return Daemon(argv, ready)
