"""Does one fault to the processes and servers of a run, and undoes what has to be undone.

Victims are live and never the last one of their layer group, unless nobody is spared: a group
without workers waits for a new process, and then the time of a start is measured, not of recovery.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.chaos.processes import Crew, Member
from services.chaos.schedule import EVERYTHING, Fault, FaultKind
from services.chaos.servers import Servers
from services.chaos.verdict import Injected
from shared.broker.base import Broker, Outgoing
from shared.errors import ConfirmTimeout, TransientError

# Broken in ways of their own; a tag of the run and a number behind each tell one from another in
# the dead letters, which may hold those of earlier runs.
GARBAGE = (b"\x93garbage ", b"", b"\x00" * 64, b'{"kind": "step.v1"} ', b"\x81\xa4kind\xa7step.v1 ")


@dataclass(slots=True)
class _Thaw:
    at_s: float
    member: Member
    process_id: int


@dataclass(slots=True)
class FaultLog:
    """What was done so far."""

    injected: list[Injected] = field(default_factory=list)
    put_off: list[str] = field(default_factory=list)
    garbage: set[bytes] = field(default_factory=set)  # confirmed
    unconfirmed: set[bytes] = field(default_factory=set)  # its fate is unknown
    withdrawn: set[bytes] = field(default_factory=set)  # said not to have been sent
    failure: BaseException | None = None


class Faults:
    """Injects faults; `tend` is called in every turn. One server restart runs at a time."""

    def __init__(
        self,
        crew: Crew,
        servers: Servers,
        broker: Broker,
        queues: Sequence[str],
        *,
        clock: Callable[[], float],
        say: Callable[[str], None],
        frozen_s: float,
        spare_last: bool,
    ) -> None:
        self.log = FaultLog()
        self._crew = crew
        self._servers = servers
        self._broker = broker
        self._queues = tuple(queues)
        self._clock = clock
        self._say = say
        self._frozen_s = frozen_s
        self._spare_last = spare_last
        self._thaws: list[_Thaw] = []
        self._restarting: threading.Thread | None = None
        self._num_garbage = 0
        self._tag = secrets.token_hex(4)

    def inject(self, fault: Fault) -> None:
        """Do it now, or note that it was put off because there is no victim."""
        match fault.kind:
            case FaultKind.KILL | FaultKind.STOP | FaultKind.FREEZE | FaultKind.HANG:
                self._strike(fault)
            case FaultKind.RESTART:
                self._restart(fault)
            case FaultKind.GARBAGE:
                self._garbage(fault)

    def tend(self, now_s: float) -> None:
        """Let those go on who were frozen long enough: zombies, which must be fenced."""
        if self.log.failure is not None:
            raise self.log.failure
        for thaw in [t for t in self._thaws if now_s >= t.at_s]:
            self._thaws.remove(thaw)
            if thaw.member.pid == thaw.process_id and thaw.member.is_alive:
                self._crew.thaw(thaw.member)
                self._say(f"goes on: {thaw.member.name}")

    def finish(self) -> None:
        """Wait for a restart that runs, and let everybody go on."""
        if self._restarting is not None:
            self._restarting.join()
        self.tend(float("inf"))

    def _strike(self, fault: Fault) -> None:
        victims = self._victims(fault.target)
        if not victims:
            self._put_off(fault, f"no {fault.target} to spare")
            return
        victim = victims[min(int(fault.draw * len(victims)), len(victims) - 1)]
        now_s = self._clock()
        if fault.kind is FaultKind.KILL:
            self._crew.kill(victim)
        elif fault.kind is FaultKind.STOP:
            self._crew.terminate(victim)
        elif fault.kind is FaultKind.HANG:
            self._crew.hang(victim)
        else:
            self._crew.freeze(victim)
            self._thaws.append(_Thaw(now_s + self._frozen_s, victim, victim.pid))
        self._note(fault, now_s, now_s, victim.name)

    def _victims(self, role: str) -> list[Member]:
        awake = [m for m in self._crew.of(role) if m.is_alive and not m.is_stuck]
        if not self._spare_last or role != "worker":
            return awake
        now_s = self._clock()
        # One that has just been started does not serve yet.
        ready = [m for m in awake if now_s - m.started_s > 3.0]
        return [m for m in awake if any(r.group == m.group and r is not m for r in ready)]

    def _restart(self, fault: Fault) -> None:
        if self._restarting is not None and self._restarting.is_alive():
            self._put_off(fault, "another server is being restarted")
            return

        def restart() -> None:
            began_s = self._clock()
            try:
                self._servers.restart(fault.target)
            except BaseException as error:
                self.log.failure = error
                raise
            self._note(fault, began_s, self._clock(), "answers again")

        self._say(f"{fault.name}: going down")
        if fault.target == EVERYTHING:
            for member in self._crew.members:
                self._crew.kill(member)
        self._restarting = threading.Thread(target=restart, name="restart", daemon=True)
        self._restarting.start()

    def _garbage(self, fault: Fault) -> None:
        queue = self._queues[int(fault.draw * len(self._queues)) % len(self._queues)]
        self._num_garbage += 1
        body = GARBAGE[self._num_garbage % len(GARBAGE)]
        body += f"{self._tag} {self._num_garbage}".encode()
        now_s = self._clock()
        try:
            self._broker.publish([Outgoing(queue, body, persistent=True)]).wait(5.0)
        except ConfirmTimeout as error:
            self.log.unconfirmed.add(body)
            self._put_off(fault, str(error))
            return
        except TransientError as error:
            self.log.withdrawn.add(body)
            self._put_off(fault, str(error))
            return
        self.log.garbage.add(body)
        self._note(fault, now_s, now_s, queue)

    def _note(self, fault: Fault, at_s: float, over_s: float, what: str) -> None:
        self.log.injected.append(Injected(fault.name, at_s, over_s))
        self._say(f"{fault.name}: {what}")

    def _put_off(self, fault: Fault, why: str) -> None:
        self.log.put_off.append(f"{fault.name}: {why}")
        self._say(f"{fault.name}: left out, {why}")
