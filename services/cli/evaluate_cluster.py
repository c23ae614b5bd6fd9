"""`cellpipe evaluate --cluster`: the same perplexity, computed by those who answer requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from services.cli.progress import StepBar
from services.cli.session import open_session, open_stores
from services.cli.terminating import noted_sigint
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.quality.evaluate import Evaluation
    from services.quality.footprint import Footprint
    from services.quality.windows import Windows
    from shared.config import Config
    from shared.text.tokenizer import Tokenizer


def check_cluster_options(*, reference: str, arithmetic: str, threads: int) -> None:
    """Raise `ConfigError` naming what a cluster cannot do."""
    if reference:
        raise ConfigError(
            "--reference needs the whole distributions and the states after each layer, which a "
            "cluster does not tell",
            remedy="leave out --cluster: this process computes the same bits as a cluster does",
        )
    if arithmetic != "kernel":
        raise ConfigError(
            f"--arithmetic {arithmetic} is computed in this process; a cluster has the kernel's",
            remedy="leave out --cluster, or --arithmetic",
        )
    if threads:
        raise ConfigError(
            f"--threads {threads} is for this process; a cluster's workers have their own",
            remedy="in a cluster: cellpipe worker --threads",
        )


def evaluate_in_cluster(
    config: Config, model: str, cut_for: Callable[[Tokenizer], Windows]
) -> tuple[str, str, Evaluation, Footprint]:
    """The model's id, what computed, what was found, and what the model takes.

    Ctrl-C cancels the requests that run.
    """
    from services.quality.footprint import footprint_of
    from services.quality.served import ServedRun, evaluate_served
    from shared.store.shards import ShardStore

    with open_stores(config) as stores:
        shards = ShardStore(stores.weights)
        layout = shards.active_layout(model)
        footprint = footprint_of(shards.get_manifest(layout.model_id).checked())
    with open_session(
        config, model=layout.model_id, cluster=True, num_groups=1, num_threads=0
    ) as session:
        run = ServedRun(
            session.producer, cut_for(session.tokenizer), session.model_id, session.check
        )
        with StepBar("tokens scored") as bar, noted_sigint() as is_interrupted:

            def show(done: int, total: int) -> None:
                bar.show(done, total)
                if is_interrupted():
                    raise KeyboardInterrupt

            try:
                found = evaluate_served(
                    run, max_positions=session.model.max_positions, progress=show
                )
            except KeyboardInterrupt:
                typer.echo("interrupted; the requests that ran are cancelled", err=True)
                raise
    groups = "1 layer group" if layout.num_groups == 1 else f"{layout.num_groups} layer groups"
    words = f"the kernel in a cluster, {groups} over wire {layout.wire}"
    return session.model_id, words, found, footprint
