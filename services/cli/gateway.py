"""`cellpipe gateway`, `serve` and `key`: the HTTP API, of a cluster or of this process. Wires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.cluster import ModelOption, stop_on_signals
from services.cli.gateway_options import GatewayOptions, with_gateway_options
from services.cli.generate import Groups, NoPrefixCache, Threads
from services.cli.settings import DEFAULT_MODEL, load_config
from services.cli.tree import app

if TYPE_CHECKING:
    from services.embedded import Engine
    from services.gateway.backend import Backend
    from shared.broker.base import Broker
    from shared.store.connection import Stores

CLUSTER_GATHER_S = 0.005  # so that one read brings tokens of many streams


@app.command()
@with_gateway_options
def gateway(model: ModelOption = "", *, options: GatewayOptions) -> None:
    """Serve an OpenAI-compatible HTTP API for a cluster until SIGTERM or Ctrl-C.

    Several may run: a stream that is cut off from one goes on at another.

    Example: cellpipe gateway --port 8000
    """
    from services.cli.session import open_cluster

    config = load_config()
    run = options.server(config)
    stop_on_signals()
    with open_cluster(config) as (broker, stores):
        run(_cluster_backend(broker, stores, model))


@app.command()
@with_gateway_options
def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A catalog name, a model's own name or name@digest, or a path to a .gguf file or "
            "a Hugging Face folder.",
        ),
    ] = DEFAULT_MODEL,
    groups: Groups = 1,
    threads: Threads = 0,
    no_prefix_cache: NoPrefixCache = False,
    *,
    options: GatewayOptions,
) -> None:
    """Serve an OpenAI-compatible HTTP API with the pipeline in this process; no servers needed.

    Example: cellpipe serve --port 8000
    """
    from services.cli.session import open_engine

    config = load_config()
    run = options.server(config)
    stop_on_signals()
    with open_engine(
        config,
        model,
        num_groups=groups,
        num_threads=threads,
        prefix_cache=not no_prefix_cache,
    ) as engine:
        run(_embedded_backend(engine))


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Whose key it is, as logs will call it.")],
) -> None:
    """Make an API key: the key on standard error, its line for --api-keys-file on standard output.

    The file holds no key, only its digest: the key is shown once.

    Example: cellpipe key alice >> keys.txt
    """
    from services.gateway.access import key_line, new_key

    fresh = new_key()
    typer.echo(key_line(name, fresh))
    typer.echo(f"key of {name}: {fresh}", err=True)


def _cluster_backend(broker: Broker, stores: Stores, model: str) -> Backend:
    from services.gateway.backend import Backend
    from services.scheduler.service import read_served_model
    from shared.producer import Producer
    from shared.store.completions import Completions
    from shared.store.ledger import Ledger
    from shared.store.presence import Presence
    from shared.store.shards import ShardStore
    from shared.topology import control_queues

    served = read_served_model(ShardStore(stores.weights), model)
    broker.declare(control_queues())
    ledger, presence = Ledger.of(stores), Presence(stores.meta)

    def problem() -> str:
        if not presence.schedulers():
            return "no scheduler runs"
        missing = [str(g) for g, n in enumerate(presence.coverage(served.layout)) if not n]
        return f"no worker serves layer group {', '.join(missing)}" if missing else ""

    return Backend(
        producer=Producer(broker, ledger),
        ledger=ledger,
        completions=Completions(stores.meta),
        tokenizer=served.tokenizer,
        chat_template=served.chat_template,
        model_id=served.layout.model_id,
        vocab_size=served.config.vocab_size,
        max_positions=served.config.max_position_embeddings,
        problem=problem,
        gather_s=CLUSTER_GATHER_S,
        keep_answers_s=stores.keep_answers_s,
    )


def _embedded_backend(engine: Engine) -> Backend:
    from services.embedded import GATHER_S
    from services.gateway.backend import Backend
    from shared.store.completions import Completions
    from shared.store.connection import connect

    def problem() -> str:
        return "" if engine.is_alive else "the pipeline has failed"

    return Backend(
        producer=engine.producer,
        ledger=engine.ledger,
        completions=Completions(connect("memory://").meta),
        tokenizer=engine.tokenizer,
        chat_template=engine.chat_template,
        model_id=engine.model_id,
        vocab_size=engine.config.vocab_size,
        max_positions=engine.config.max_position_embeddings,
        problem=problem,
        gather_s=GATHER_S,
    )
