"""A Prefect server that a test may stop, freeze, start again, and rob of its database."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

START = 120.0  # seconds


class PrefectServer:
    def __init__(self, home: Path) -> None:
        self._home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns once it answers."""
        environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"} | {
            "PREFECT_HOME": str(self._home),
            "PREFECT_SERVER_API_PORT": str(self._port),
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        }
        argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        with (self._home.parent / f"{self._home.name}.log").open("a") as output:
            self._process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + START
        while not self._answers():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)

    def kill(self) -> None:
        """Without a goodbye to anybody, as when its machine goes down."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def lose_database(self) -> None:
        """Only while it is down."""
        assert self._process is None
        shutil.rmtree(self._home)
        self._home.mkdir()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    @contextmanager
    def used(self) -> Iterator[None]:
        """By this process and, through the environment, by those that it starts."""
        before = os.environ.get("PREFECT_API_URL")
        os.environ["PREFECT_API_URL"] = self.url
        try:
            with temporary_settings({PREFECT_API_URL: self.url, PREFECT_LOGGING_TO_API_ENABLED: False}):
                yield
        finally:
            if before is None:
                del os.environ["PREFECT_API_URL"]
            else:
                os.environ["PREFECT_API_URL"] = before
