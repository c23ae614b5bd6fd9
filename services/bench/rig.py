"""A cluster on this machine that is measured: scheduler, workers, and who asks them.

Knows what it takes to ask and to be answered; what is asked and what the times mean is for others.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

from services.bench.hops import HopSums, sums_by_group
from services.bench.latency import Stream
from services.bench.options import ClusterOptions
from shared.errors import ConfigError, RequestError, TransientError
from shared.local_cluster.load import Load, Question
from shared.local_cluster.processes import Crew
from shared.local_cluster.servers import PrivateServers, Servers
from shared.local_cluster.start import connections, wait_until_serving
from shared.messages import FinishReason, SamplingParams
from shared.model.config import ModelConfig
from shared.producer import Producer
from shared.store.ledger import Ledger
from shared.store.presence import Presence
from shared.store.shards import ShardStore
from shared.topology import Layout, group_bytes

LOOK_S = 0.05
HEARTBEATS_S = 15.0  # in which every worker has told of itself anew

Prompts = Sequence[tuple[int, ...]]


@contextmanager
def private_servers(
    options: ClusterOptions, say: Callable[[str], None]
) -> Iterator[tuple[Servers, Path]]:
    """Servers of this run, and the folder for the logs of what it starts."""
    with tempfile.TemporaryDirectory(prefix="cellpipe-bench-") as name:
        folder = Path(name)
        logs = options.log_folder or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        say("starting servers")
        servers = PrivateServers(folder)
        try:
            yield servers, logs
        finally:
            servers.close()


class Rig:
    """Scheduler and workers of one number of groups; a context manager.

    Raises `ConfigError` when it cannot start, or when the model holds fewer than `num_positions`.
    """

    layout: Layout
    config: ModelConfig
    mean_group_bytes: int  # of weights
    producer: Producer

    def __init__(
        self,
        options: ClusterOptions,
        num_groups: int,
        servers: Servers,
        logs: Path,
        say: Callable[[str], None],
        *,
        num_positions: int,
    ) -> None:
        self.num_groups = num_groups
        self.say = say
        self._options = options
        self._num_positions = num_positions
        self._servers = servers
        self._logs = logs
        self._stack = ExitStack()
        self._rng = random.Random(f"bench/{options.seed}/{num_groups}")

    def __enter__(self) -> Rig:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prompts(self, number: int, num_tokens: int) -> Prompts:
        """Random tokens, new ones every time: nobody finds them in a cache."""
        vocab_size = self.config.vocab_size
        return [
            tuple(self._rng.randrange(vocab_size) for _ in range(num_tokens)) for _ in range(number)
        ]

    def ask(self, prompts: Prompts, num_tokens: int) -> Load:
        """Greedy answers of so many tokens to all prompts at once; they have been asked."""
        # Without drafts: an answer that goes round in circles would flatter us beside a peer.
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, speculation=False
        )
        load = Load(
            self.producer,
            [Question(prompt, sampling) for prompt in prompts],
            num_requests=len(prompts),
            concurrency=len(prompts),
            patience_s=self._options.patience_s,
            model_id=self.layout.model_id,
        )
        load.start()
        return load

    def check(self) -> None:
        """Raise `RequestError` if a process of the cluster has died."""
        if dead := [m.name for m in self._crew.members if not m.is_alive]:
            raise RequestError(f"{dead[0]} died while it was measured")

    def answer(self, prompts: Prompts, num_tokens: int) -> list[Stream]:
        """All prompts at once, answered. Raises `RequestError` when an answer is not whole."""
        load = self.ask(prompts, num_tokens)
        try:
            while load.is_running():
                self.check()
                time.sleep(LOOK_S)
        finally:
            load.stop()
        for seen in load.sightings:
            is_whole = len(seen.tokens) == num_tokens
            if seen.finish_reason is not FinishReason.LENGTH or not is_whole:
                raise RequestError(
                    f"an answer ended after {len(seen.tokens)} of {num_tokens} "
                    f"tokens: {seen.error or seen.finish_reason or 'nothing more was heard'}"
                )
        return [
            Stream(seen.submitted_s, tuple(at_s for at_s, _, _ in seen.tokens), len(seen.tokens))
            for seen in load.sightings
        ]

    def sums(self) -> list[HopSums]:
        """What all workers have told since now: they do with each heartbeat."""
        now_ms = time.time_ns() // 1_000_000
        deadline_s = time.monotonic() + HEARTBEATS_S
        num_workers = self.num_groups * self._options.workers_per_group
        while time.monotonic() < deadline_s:
            workers = self._presence.workers(self.layout)
            if sum(worker.told_unix_ms > now_ms for worker in workers) == num_workers:
                return sums_by_group(workers, self.num_groups)
            time.sleep(LOOK_S)
        raise TransientError(f"not all workers gave a sign of life within {HEARTBEATS_S:g} s")

    def _start(self) -> None:
        options, settings = self._options, self._servers.settings
        enter = self._stack.enter_context
        crew = enter(Crew(settings, self._logs))
        crew.run(
            "load", options.model, "--groups", str(self.num_groups),
            "--queue-type", options.queue_type, "--wire", options.wire,
        )  # fmt: skip
        stores, broker = enter(connections(settings))
        shards = ShardStore(stores.weights)
        self.layout = shards.active_layout("")
        manifest = shards.get_manifest(self.layout.model_id)
        self.config = ModelConfig.from_dict(manifest.config)
        self.mean_group_bytes = round(
            fmean(group_bytes(manifest, self.layout, group) for group in range(self.num_groups))
        )
        if self._num_positions > self.config.max_position_embeddings:
            raise ConfigError(
                f"prompts and answers make {self._num_positions} positions, and the model has "
                f"{self.config.max_position_embeddings}"
            )
        self._presence = Presence(stores.meta)
        self.producer = Producer(broker, Ledger.of(stores))
        self.say(
            f"starting a scheduler and {self.num_groups} x {options.workers_per_group} workers"
        )
        name = f"{self.num_groups}-groups"
        crew.add("scheduler", f"{name}-scheduler", "scheduler")
        for group in range(self.num_groups):
            for number in range(options.workers_per_group):
                crew.add(
                    "worker", f"{name}-worker-{group}.{number}",
                    "worker", "--group", str(group), "--memory", options.memory,
                    "--threads", str(options.threads), group=group,
                )  # fmt: skip
        wait_until_serving(crew, self.layout, self._presence)
        self._crew = crew
