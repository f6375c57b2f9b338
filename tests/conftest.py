"""What several test folders share: a Prefect server of the session, and the real Slurm of tests/slurm_lab."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Prefect: nothing of the developer's own profile, database or server takes part.
_HOME = tempfile.TemporaryDirectory(prefix="prefect-", ignore_cleanup_errors=True)
for _name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[_name]
os.environ |= {
    "PREFECT_HOME": _HOME.name,
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "HF_HUB_OFFLINE": "0",
    "OMP_NUM_THREADS": "1",
}

import httpx  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["tests.slurm_lab.fixtures"]

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """The API address of a Prefect server on loopback, used by this process too while the fixture lives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    environment = os.environ | {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = Path(_HOME.name) / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for(url, server, log)
        with _Settings(PREFECT_API_URL=url):
            yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError(f"the Prefect server did not start:\n{log.read_text()[-2000:]}")


class _Settings:
    """Prefect settings of this process and, through the environment, of the ones it starts."""

    def __init__(self, **values: str) -> None:
        self._values = values

    def __enter__(self) -> None:
        from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

        os.environ |= self._values
        # Logs of this process would be sent in the background, and tried again for a minute when the server is gone.
        here = {PREFECT_API_URL: self._values["PREFECT_API_URL"], PREFECT_LOGGING_TO_API_ENABLED: False}
        self._scope = temporary_settings(here)
        self._scope.__enter__()

    def __exit__(self, *error: object) -> None:
        from prefect.events.worker import EventsWorker

        EventsWorker.drain_all()
        self._scope.__exit__(None, None, None)
        for name in self._values:
            del os.environ[name]
