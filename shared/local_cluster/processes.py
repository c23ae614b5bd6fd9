"""The processes of one run: schedulers and workers as `cellpipe` commands, started again when dead.

Ends only what it started, by its own handle. Knows no queue and no request.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import shared
from shared.errors import ConfigError

CELLPIPE = (sys.executable, "-m", "services.cli")
ROOT = Path(shared.__file__).resolve().parent.parent
RESPAWN_S = 1.0
LEAVE_S = 15.0


def rss_bytes_of(pid: int) -> int | None:
    """Resident memory of a process; None if it is gone, or where there is no /proc."""
    with suppress(OSError, IndexError, ValueError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def cpu_s_of(pid: int) -> float | None:
    """Seconds of a core that a process has taken so far; None as `rss_bytes_of`."""
    with suppress(OSError, IndexError, ValueError):
        # The name, in brackets, may hold anything; utime and stime are fields 14 and 15 (proc(5)).
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
    return None


@dataclass(slots=True)
class Member:
    """One place in the cluster and the process that fills it now."""

    role: str
    name: str
    arguments: tuple[str, ...]
    group: int | None = None
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    is_stuck: bool = False  # frozen, or hung
    killed_by_us: bool = False
    respawn_s: float | None = None
    num_starts: int = 0
    hang_file: Path | None = None  # its next step hangs once this exists

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid


@dataclass(slots=True)
class OwnDeath:
    """A process that ended although nobody here ended it."""

    name: str
    exit_code: int
    log_tail: str = field(repr=False)


class Crew:
    """All schedulers and workers of a run. A context manager that leaves nothing behind.

    With `can_hang`, its workers look for a file before each computation that `hang` makes.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        log_folder: Path,
        *,
        respawn_s: float = RESPAWN_S,
        can_hang: bool = False,
    ) -> None:
        self.members: list[Member] = []
        self.own_deaths: list[OwnDeath] = []
        self._settings = dict(settings)
        self._log_folder = log_folder
        self._respawn_s = respawn_s
        self._can_hang = can_hang

    def run(self, *arguments: str, timeout_s: float = 600.0) -> None:
        """Run a command to its end. Raises `ConfigError` with what it said when it fails."""
        ended = subprocess.run(
            [*CELLPIPE, *arguments],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if ended.returncode != 0:
            raise ConfigError(
                f"`cellpipe {' '.join(arguments)}` failed: {ended.stderr.strip()[-800:]}"
            )

    def add(self, role: str, name: str, *arguments: str, group: int | None = None) -> Member:
        member = Member(role, name, arguments, group)
        if self._can_hang and role == "worker":
            member.hang_file = self._log_folder / f"{name}.hang"
        self.members.append(member)
        self._start(member)
        return member

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    def tend(self, now_s: float) -> None:
        """Notice who has died, and start them again a moment later; called in every turn."""
        for member in self.members:
            if member.is_alive:
                continue
            if member.respawn_s is None:
                if not member.killed_by_us and member.process is not None:
                    code = int(member.process.returncode)
                    self.own_deaths.append(OwnDeath(member.name, code, self._tail(member)))
                member.respawn_s = now_s + self._respawn_s
            elif now_s >= member.respawn_s:
                self._start(member)

    def kill(self, member: Member) -> None:
        """SIGKILL: it has no chance to say goodbye."""
        member.killed_by_us = True
        self._signal(member, signal.SIGKILL)

    def freeze(self, member: Member) -> None:
        member.is_stuck = True
        self._signal(member, signal.SIGSTOP)

    def thaw(self, member: Member) -> None:
        member.is_stuck = False
        self._signal(member, signal.SIGCONT)

    def terminate(self, member: Member) -> None:
        """SIGTERM: it hands back what it holds."""
        member.killed_by_us = True
        self._signal(member, signal.SIGTERM)

    def hang(self, member: Member) -> None:
        """Its next computation does not end, and its watchdog will end it."""
        assert member.hang_file is not None, f"{member.role} cannot hang"
        member.killed_by_us = member.is_stuck = True
        member.hang_file.touch()

    def rss_bytes(self) -> Iterator[tuple[Member, int]]:
        """Resident memory of each live member; none where there is no /proc."""
        for member in self.members:
            if not member.is_alive:
                continue
            if (num_bytes := rss_bytes_of(member.pid)) is not None:
                yield member, num_bytes

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        running = [m for m in self.members if m.is_alive]
        for member in running:
            self.terminate(member)
            self.thaw(member)  # a frozen one does not hear SIGTERM
        deadline_s = time.monotonic() + LEAVE_S
        for member in running:
            assert member.process is not None
            try:
                member.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()

    def _start(self, member: Member) -> None:
        with self._log(member).open("ab") as log:
            member.process = subprocess.Popen(
                [*CELLPIPE, *member.arguments],
                env=self._environment() | self._fault_points(member),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C at our terminal is for us, who then end them.
                start_new_session=True,
            )
        member.started_s = time.monotonic()
        member.is_stuck = member.killed_by_us = False
        member.respawn_s = None
        member.num_starts += 1

    def _fault_points(self, member: Member) -> dict[str, str]:
        if member.hang_file is None:
            return {}
        member.hang_file.unlink(missing_ok=True)
        return {"CELLPIPE_TEST_FAULTS": f"hang@compute:file={member.hang_file}"}

    def _signal(self, member: Member, signum: signal.Signals) -> None:
        if member.process is not None:
            member.process.send_signal(signum)  # does nothing once it has been reaped

    def _log(self, member: Member) -> Path:
        return self._log_folder / f"{member.name}.log"

    def _tail(self, member: Member) -> str:
        return self._log(member).read_text(errors="replace")[-2000:]

    def _environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("CELLPIPE_") or key in ("CELLPIPE_CACHE_DIR", "CELLPIPE_KERNEL")
        }
        paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
        return {**kept, "PYTHONPATH": os.pathsep.join(paths), **self._settings}
