"""The same function as a quantised model's, by weights that lie on no grid of it.

No unquantised model is at hand that tests could carry, and a quantised one that is dequantised
would flatter whoever finds its old grid again. But much in a model's weights is arbitrary. The
channels of the hidden state, and those inside of each MLP, may be put in any other order in all
tensors that meet them, and the values of each kv head may be turned by any rotation that the output
matrix turns back: the model computes the same function. A group of 32 inputs then holds weights of
up to 32 old groups, each with a scale and min of its own, or sums over 64 of them. No scale and min
of a new group fits those better than they fit a model's that never was quantised, so rounding costs
what it costs there. What the model lost when it was quantised first is in the reference and is not
counted.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from shared.formats.gguf_copy import copy_metadata
from shared.formats.gguf_file import open_gguf
from shared.formats.reading import read_float32


def write_shuffled(source: Path, target: Path, seed: int = 0) -> Path:
    """An F16 file of the llama in `source`, its channels in another order, its values turned."""
    file = open_gguf(source)
    keys = {k.removeprefix("llama."): v for k, v in file.metadata.items()}
    hidden, inner = keys["embedding_length"], keys["feed_forward_length"]
    heads, kv_heads = keys["attention.head_count"], keys["attention.head_count_kv"]
    head_dim = hidden // heads
    rng = np.random.default_rng(seed)
    order = rng.permutation(hidden)
    writer = gguf.GGUFWriter(str(target), "llama")
    copy_metadata(source, writer)
    layers = [
        (rng.permutation(inner), [_rotation(rng, head_dim) for _ in range(kv_heads)])
        for _ in range(keys["block_count"])
    ]
    for name, stored in file.tensors.items():
        w = read_float32(stored, 0, stored.num_rows)
        kind = name.removesuffix(".weight").rpartition(".")[2]
        inner_order, turns = layers[int(name.split(".")[1])] if "blk" in name else ([], [])
        writes = kind in ("attn_output", "ffn_down")  # into the hidden state; others read it
        w = w[order] if writes else w[:, order]
        if kind in ("ffn_gate", "ffn_up"):
            w = w[inner_order]
        elif kind == "ffn_down":
            w = w[:, inner_order]
        elif kind == "attn_v":
            w = _turned(w, turns)
        elif kind == "attn_output":
            repeated = [turn for turn in turns for _ in range(heads // kv_heads)]
            w = _turned(w.T, repeated).T
        if len(stored.shape) == 1:
            writer.add_tensor(name, np.float32(w[0]))
        else:
            writer.add_tensor(name, np.float16(w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _rotation(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def _turned(rows: np.ndarray, turns: list[np.ndarray]) -> np.ndarray:
    """The rows of each head, mixed by its rotation."""
    heads = np.split(rows.astype(np.float64), len(turns))
    return np.concatenate([turn @ head for turn, head in zip(turns, heads, strict=True)])
