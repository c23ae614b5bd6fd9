"""Runs a target with inputs that coverage guides: python -m tests.fuzz.guided codec --seconds 120

Targets are the `fuzz_*.py` beside this file. Needs the extra: pip install -e '.[dev,fuzz]'. Starts
from `corpus/` and what earlier runs found in `--work`. An input that crashes, hangs or takes too
much memory is left in `--work` and the exit code is not 0; give it as --input to see it again.

    python -m tests.fuzz.guided --write-corpus     makes corpus/ anew from the targets' seeds
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgpack
import structlog

from tests.fuzz.mutations import mutate_structure

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))
MAX_INPUT_BYTES = 32 << 10
MAX_RSS_MB = 1024
MAX_INPUT_S = 30


def load_target(name: str) -> ModuleType:
    """A module with `one_input(bytes)`, which raises when something is wrong, and `seeds()`.

    `PREFIX_BYTES`, if it has them, come before what is usually a msgpack map.
    """
    return importlib.import_module(f"tests.fuzz.fuzz_{name}")


def corpus_of(name: str) -> list[Path]:
    return sorted((CORPUS / name).iterdir())


def write_corpus() -> None:
    for name in TARGETS:
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, body in load_target(name).seeds().items():
            (folder / file).write_bytes(body)


def structural_mutator(prefix_bytes: int) -> Callable[[bytes, int, int], bytes]:
    """Half of all mutations keep what follows the prefix a msgpack map: others seldom do."""
    import atheris

    def mutate(body: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            try:
                fields = msgpack.unpackb(body[prefix_bytes:])
                packed = msgpack.packb(mutate_structure(fields, rng))
                return (body[:prefix_bytes] + packed)[:max_bytes]
            except (ValueError, TypeError, RecursionError, OverflowError):
                pass  # no frame any more
        return bytes(atheris.Mutate(body, max_bytes))

    return mutate


def fuzz(name: str, work: Path, seconds: int, more: list[str]) -> None:
    """Ends the process."""
    import atheris

    with atheris.instrument_imports(include=["shared", "services"]):
        target = load_target(name)
    # A line for every refused input would be most of the time.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found = work / name
    found.mkdir(parents=True, exist_ok=True)
    prefix_bytes = getattr(target, "PREFIX_BYTES", None)
    mutator = {} if prefix_bytes is None else {"custom_mutator": structural_mutator(prefix_bytes)}
    atheris.Setup(
        [
            "fuzz",
            f"-max_total_time={seconds}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-rss_limit_mb={MAX_RSS_MB}",
            f"-timeout={MAX_INPUT_S}",
            f"-artifact_prefix={found}-",
            *more,
            str(found),
            str(CORPUS / name),
        ],
        target.one_input,
        **mutator,
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "cellpipe-fuzz")
    parser.add_argument("--input", type=Path, help="Run one input and no more; needs no atheris.")
    parser.add_argument("--write-corpus", action="store_true")
    options, more = parser.parse_known_args()
    if options.write_corpus:
        write_corpus()
    elif options.target is None:
        parser.error(f"give a target: {', '.join(TARGETS)}")
    elif options.input:
        load_target(options.target).one_input(options.input.read_bytes())
    else:
        fuzz(options.target, options.work, options.seconds, more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
