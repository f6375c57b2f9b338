"""A Prefect server that can be broken."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

LABEL = "trainium.run-folder"
START_SECONDS = 120.0


class Server:
    """On loopback, with a home and a port of its own that stay the same over restarts."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True)
        self.home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> Mapping[str, str]:
        """For those who use it."""
        return {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.home / "client")}

    def start(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment = inherited | {
            "PREFECT_HOME": str(self.home),
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        with (self.home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the Prefect server did not start: {(self.home / 'server.log').read_text()[-2000:]}")

    def stop(self) -> None:
        """In order, as `systemctl stop` would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def lose_database(self) -> None:
        """While it is stopped: every flow run, block and artifact is gone."""
        for file in self.home.glob("prefect.db*"):
            file.unlink()

    def flow_runs(self, folder: Path) -> list[dict[str, Any]]:
        """The flow runs that have worked on a run folder, the newest first."""
        answer = httpx.post(
            f"{self.url}/flow_runs/filter", json={"sort": "EXPECTED_START_TIME_DESC", "limit": 100}, timeout=30
        )
        answer.raise_for_status()
        runs: list[dict[str, Any]] = answer.json()
        return [run for run in runs if run.get("labels", {}).get(LABEL) == str(folder)]

    def cancel(self, flow_run: UUID | str) -> None:
        """As the UI's button does."""
        state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        httpx.post(f"{self.url}/flow_runs/{flow_run}/set_state", json=state, timeout=30).raise_for_status()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._send(number)
        self._send(signal.SIGCONT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self._process.wait()
        self._process = None
