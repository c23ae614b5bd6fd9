"""Publishes the steps that follow, each to the worker it is meant for. Knows no kernel.

Who lives and how loaded they are is read from presence twice a second. Whoever tells nothing new,
or left a step lying in its inbox, gets none while somebody else can take it. Without presence, in
the embedded mode, every step goes to its group's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import structlog

from services.worker.stages import PUBLISH, Stages
from shared.broker.base import Broker, Confirm, Outgoing
from shared.errors import StoreDamaged, StoreUnavailable
from shared.late_frame import Frame
from shared.liveness import PEERS_REFRESH_S
from shared.messages import Step
from shared.router import Peer, choose_worker, worker_of
from shared.silence import Silence
from shared.store.presence_types import WorkerInfo
from shared.topology import Layout, group_queue, inbox_queue

log = structlog.get_logger()


class Sender:
    """The way out of one worker. `read_peers` gives the live workers, None where there is none."""

    def __init__(
        self,
        broker: Broker,
        layout: Layout,
        *,
        read_peers: Callable[[], Sequence[WorkerInfo]] | None,
        clock: Callable[[], float],
        stages: Stages,
    ) -> None:
        self._broker = broker
        self._layout = layout
        self._read_peers = read_peers
        self._clock = clock
        self._stages = stages
        self._peers: dict[str, Peer] = {}
        self._silence = Silence()
        self._refresh_at_s = 0.0

    def choose(self, group: int, routed: str, *, shunned: str = "", is_bound: bool = False) -> str:
        """The worker for a step of a group, given who had its request before; "" for any.

        `shunned` is taken only if nobody else is there. A step that `is_bound` stays where it was,
        however loaded that one is.
        """
        self._refresh_when_due()
        chosen = choose_worker(
            group, routed, list(self._peers.values()), shunned=shunned, is_bound=is_bound
        )
        if chosen and chosen != routed:
            self._peers[chosen] = self._peers[chosen].assigned()
        return chosen

    def doubt(self, worker_id: str) -> None:
        """A step came here because that worker did not take it: it may be dead."""
        self._silence.doubt(worker_id)
        if worker_id in self._peers:
            self._peers[worker_id] = replace(self._peers[worker_id], is_silent=True)

    def serve(self, route: Sequence[str], groups: Iterable[int]) -> bool:
        """Whether the workers on a route are there, and serve those groups."""
        self._refresh_when_due()
        peers = [(group, self._peers.get(worker_of(route, group))) for group in groups]
        return all(peer is not None and peer.can_take(group) for group, peer in peers)

    def publish(self, steps: Sequence[Step]) -> Confirm | None:
        """Send steps to the workers that their routes name. None when there is nothing to send."""
        if not steps:
            return None
        outgoing = [self._addressed(step) for step in steps]
        self._stages.lap(PUBLISH)  # what follows is on the way with the messages
        return self._broker.publish(outgoing)

    def _addressed(self, step: Step) -> Outgoing:
        shared = group_queue(self._layout.model_id, self._layout.layout_id, step.group)
        worker_id = worker_of(step.route, step.group)
        if worker_id:
            inbox = inbox_queue(worker_id, step.group)
            return Outgoing(inbox, Frame(step), instead=shared)
        return Outgoing(shared, Frame(step))

    def _refresh_when_due(self) -> None:
        now_s = self._clock()
        if self._read_peers is None or now_s < self._refresh_at_s:
            return
        self._refresh_at_s = now_s + PEERS_REFRESH_S
        try:
            infos = self._read_peers()
        except (StoreUnavailable, StoreDamaged) as error:
            log.warning("peers_not_read", reason=str(error))
            return  # with those known before; an inbox without its worker hands over by itself
        self._silence.note(infos, now_s=now_s)
        self._peers = {
            info.worker_id: Peer.of(
                info, is_silent=self._silence.is_silent(info.worker_id, now_s=now_s)
            )
            for info in infos
        }
