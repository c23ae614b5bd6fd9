"""What all share: switches, broker and store carry so much a second, and the rest waits.

Each is a server of constant rate with one queue: random arrivals make it an M/D/1 queue, and more
than it carries a backlog that grows.
"""

from __future__ import annotations

from services.simulator.world import Network

MAX_USED = 0.98  # beyond it the backlog says more than the mean


class Tiers:
    """The shared parts of a network. `delay` is what a hop waits for them now."""

    def __init__(self, network: Network) -> None:
        self.names = [tier.name for tier in network.tiers]
        self._tiers = [
            (tier.units_per_message / tier.units_per_s, tier.units_per_byte / tier.units_per_s)
            for tier in network.tiers
        ]
        self._clear_s = [0.0] * len(self._tiers)  # when what was sent so far is through
        self.busy_s = [0.0] * len(self._tiers)
        self.max_wait_s = [0.0] * len(self._tiers)

    def delay(self, now_s: float, num_messages: float, num_bytes: float) -> float:
        """Send so much; returns the seconds that a message of it waits for its turn."""
        waited_s = 0.0
        clear_s = self._clear_s
        for number, (message_s, byte_s) in enumerate(self._tiers):
            took_s = num_messages * message_s + num_bytes * byte_s
            begin_s = clear_s[number]
            if begin_s > now_s:
                wait_s = begin_s - now_s
                waited_s += wait_s
                if wait_s > self.max_wait_s[number]:
                    self.max_wait_s[number] = wait_s
            else:
                begin_s = now_s
            clear_s[number] = begin_s + took_s
            self.busy_s[number] += took_s
        return waited_s

    def delay_over(
        self, begin_s: float, end_s: float, num_messages: float, num_bytes: float
    ) -> float:
        """Send so much, spread over some time; returns what a message waits at the end of it.

        Within that time arrivals are random: the mean wait of an M/D/1 queue, u / (2 - 2u) of what
        one message takes at utilisation u, comes to the backlog that is left.
        """
        waited_s, length_s = 0.0, end_s - begin_s
        for number, (message_s, byte_s) in enumerate(self._tiers):
            took_s = num_messages * message_s + num_bytes * byte_s
            self.busy_s[number] += took_s
            begun_s = max(self._clear_s[number], begin_s)
            self._clear_s[number] = begun_s + took_s
            wait_s = max(0.0, self._clear_s[number] - end_s)
            used = min(took_s / length_s, MAX_USED)
            wait_s += used / (2.0 - 2.0 * used) * took_s / num_messages
            waited_s += wait_s
            self.max_wait_s[number] = max(self.max_wait_s[number], wait_s)
        return waited_s

    def utilisation(self, over_s: float) -> dict[str, float]:
        return {n: b / over_s for n, b in zip(self.names, self.busy_s, strict=True)}

    def longest_waits_s(self) -> dict[str, float]:
        return dict(zip(self.names, self.max_wait_s, strict=True))
