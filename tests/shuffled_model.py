"""The same function as a quantised model's, by weights that lie on no grid of it.

There is no unquantised model at hand that tests could carry; a quantised one that is dequantised
would flatter whoever finds its old grid again. But the order of a model's channels is arbitrary:
those of the hidden state, those inside of each MLP, and those of each kv head's values may be put in
any other order, in all tensors that meet them, and the model computes the same function. A group of
32 inputs then holds weights of up to 32 old groups, each with a scale and min of its own, so no
scale and min of a new group fits them better than those of a group of a model that never was
quantised: what rounding to int4 costs is what it costs there. What the model lost when it was
quantised first is in the reference and is not counted.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from shared.formats.gguf_copy import _copy_metadata  # noqa: PLC2701
from shared.formats.gguf_file import open_gguf
from shared.formats.reading import read_float32


def write_shuffled(source: Path, target: Path, seed: int = 0) -> Path:
    """An F16 file of the llama in `source` with its channels in another order."""
    file = open_gguf(source)
    keys = {k.removeprefix("llama."): v for k, v in file.metadata.items()}
    hidden, inner = keys["embedding_length"], keys["feed_forward_length"]
    heads, kv_heads = keys["attention.head_count"], keys["attention.head_count_kv"]
    head_dim = hidden // heads
    rng = np.random.default_rng(seed)
    order = rng.permutation(hidden)
    writer = gguf.GGUFWriter(str(target), "llama")
    _copy_metadata(source, writer)
    layers = [
        (rng.permutation(inner), [rng.permutation(head_dim) for _ in range(kv_heads)])
        for _ in range(keys["block_count"])
    ]
    for name, stored in file.tensors.items():
        w = read_float32(stored, 0, stored.num_rows)
        kind = name.removesuffix(".weight").rpartition(".")[2]
        inner_order, value_orders = layers[int(name.split(".")[1])] if "blk" in name else ([], [])
        if kind in ("attn_output", "ffn_down"):
            w = w[order]
        else:  # norms too
            w = w[:, order]
        if kind in ("ffn_gate", "ffn_up"):
            w = w[inner_order]
        elif kind == "ffn_down":
            w = w[:, inner_order]
        elif kind == "attn_v":
            w = w[_of_heads(value_orders, head_dim)]
        elif kind == "attn_output":
            repeated = [o for o in value_orders for _ in range(heads // kv_heads)]
            w = w[:, _of_heads(repeated, head_dim)]
        if len(stored.shape) == 1:
            writer.add_tensor(name, np.float32(w[0]))
        else:
            writer.add_tensor(name, np.float16(w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _of_heads(orders: list[np.ndarray], head_dim: int) -> np.ndarray:
    return np.concatenate([head * head_dim + order for head, order in enumerate(orders)])
