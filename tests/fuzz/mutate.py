"""Decodes millions of damaged frames of every message kind: python -m tests.fuzz.mutate

Each is a valid message or one of the codec's two errors, and memory does not grow. Exit code 1
otherwise, with the frame in hex. tests/unit/test_codec_hostile.py does it with 100,000 in CI;
this goes on for as long as it is asked to.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from dataclasses import dataclass

import msgpack

from shared.codec import JSON, MSGPACK, decode, encode, encode_json, request_id_of
from shared.errors import DecodeError, RequestError
from shared.messages import Reply, Request, Token
from tests.fuzz.mutations import mutate_bytes, mutate_structure
from tests.unit.codec_examples import EXAMPLES

SHOW_EVERY_S = 10.0
WARM_UP_FRAMES = 100_000  # interned strings, the cache of sampling parameters, arenas
MAX_GROWTH_BYTES = 32 << 20
NUM_MUTATIONS = (1, 1, 1, 2, 3, 4)  # half of all frames have one: the others are rarely valid


@dataclass(slots=True)
class Tally:
    num_frames: int = 0
    num_valid: int = 0
    num_refused: int = 0
    base_bytes: int = 0
    peak_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        """Of the most resident memory, since the warm-up."""
        return max(0, self.peak_bytes - self.base_bytes) if self.base_bytes else 0

    def note_memory(self) -> None:
        # The high-water mark: it also tells of memory that was asked for and given back.
        self.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if not self.base_bytes and self.num_frames >= WARM_UP_FRAMES:
            self.base_bytes = self.peak_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_frames:,} frames: {self.num_valid:,} valid, {self.num_refused:,} refused, "
            f"{self.peak_bytes / 2**20:.1f} MiB at most, "
            f"{self.growth_bytes / 2**20:.1f} MiB more than after the warm-up"
        )


def originals() -> list[tuple[bytes, str]]:
    """(body, content type): every example as msgpack, and as JSON where that is a form of it."""
    frames = [(encode(message), MSGPACK) for message in EXAMPLES.values()]
    return frames + [
        (encode_json(message), JSON)
        for message in EXAMPLES.values()
        if isinstance(message, Request | Reply | Token)
    ]


def damage(body: bytes, content_type: str, rng: random.Random) -> bytes:
    """One to four mutations, of bytes or of the structure."""
    if content_type == MSGPACK and rng.random() < 0.5:
        fields = msgpack.unpackb(body)
        for _ in range(rng.choice(NUM_MUTATIONS)):
            fields = mutate_structure(fields, rng)
        return bytes(msgpack.packb(fields))
    for _ in range(rng.choice(NUM_MUTATIONS)):
        body = mutate_bytes(body, rng) or body
    return body


def run(num_frames: int, seed: int, tally: Tally) -> str:
    """Decode so many frames. Returns what is wrong, "" if nothing is."""
    rng = random.Random(f"mutate/{seed}")
    frames = originals()
    began_s = shown_s = time.monotonic()
    while tally.num_frames < num_frames:
        body, content_type = frames[tally.num_frames % len(frames)]
        mutant = damage(body, content_type, rng)
        tally.num_frames += 1
        try:
            decode(mutant, content_type)
        except (DecodeError, RequestError):
            tally.num_refused += 1
            request_id_of(mutant, content_type)
        except BaseException as error:
            return f"{type(error).__name__}: {error!s:.200}\n{content_type} {mutant.hex()}"
        else:
            tally.num_valid += 1
        if tally.num_frames % 1000 == 0:
            tally.note_memory()
            if tally.growth_bytes > MAX_GROWTH_BYTES:
                return f"memory grew by over {MAX_GROWTH_BYTES >> 20} MiB"
            now_s = time.monotonic()
            if now_s - shown_s >= SHOW_EVERY_S:
                shown_s = now_s
                rate = tally.num_frames / (now_s - began_s)
                print(f"{now_s - began_s:5.0f} s  {rate:,.0f}/s  {tally}", flush=True)
    tally.note_memory()
    return "" if min(tally.num_valid, tally.num_refused) else "nothing was tested"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally = Tally()
    problem = run(options.frames, options.seed, tally)
    print(tally)
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
