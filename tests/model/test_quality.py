"""The whole model in our arithmetic against an oracle in binary64.

The oracle shares nothing with the kernel: it takes the file's numbers, dequantised, attends to all
positions at once, rotates by complex multiplication and rounds nothing. What is left between the
two is what our arithmetic costs: quantised activations, fp16 KV, binary32 sums.

T positions, D hidden_size, H heads, K kv heads, d head_dim, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from services.loader.packed import open_packed
from shared.formats.description import (
    LAYER_TENSORS,
    Int4Blocks,
    Int8Blocks,
    ModelDescription,
    layer_tensor,
)
from shared.formats.gguf import read_gguf
from shared.messages import ChatMessage
from shared.model.backend import pick_backend
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from tests.model.quality_texts import ANSWER, FOREIGN, QUESTION

NUM_POSITIONS = 64  # of each text
MAX_MEAN_KL = 0.01
MIN_TOP1 = 0.97

Float64 = npt.NDArray[np.float64]


def weights_of(description: ModelDescription, key: str) -> Float64:
    """A tensor of the file, dequantised in binary64, (rows, cols)."""
    match description.tensors[key].read():
        case Int4Blocks(scale, low, nibbles):
            q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.float64)
            w = q * scale.astype(np.float64)[:, :, None] + low.astype(np.float64)[:, :, None]
        case Int8Blocks(scale, q):
            w = q.astype(np.float64) * scale.astype(np.float64)[:, :, None]
        case values:
            return values.astype(np.float64)
    return w.reshape(len(w), -1)


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x: Float64, theta: float) -> Float64:
    """RoFormer's rotation of pairs (2i, 2i+1); x is (T, heads, d)."""
    num_positions, _, dim = x.shape
    frequency = theta ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * np.arange(num_positions)[:, None] * frequency)[:, None]  # (T, 1, d/2)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def softmax(x: Float64) -> Float64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def oracle_logits(description: ModelDescription, sequences: list[list[int]]) -> list[Float64]:
    """(T, V) for each sequence: every position's logits, in binary64 throughout."""
    c: ModelConfig = description.config
    embedding = weights_of(description, "embed_tokens")
    hidden = [embedding[ids] for ids in sequences]  # (T, D) each
    for layer in range(c.num_hidden_layers):
        weights = {
            name: weights_of(description, layer_tensor(layer, name)) for name in LAYER_TENSORS
        }
        hidden = [oracle_layer(c, weights, x) for x in hidden]
    norm = weights_of(description, "norm")
    head = embedding if c.tie_word_embeddings else weights_of(description, "lm_head")
    return [rms_norm(x, norm, c.rms_norm_eps) @ head.T for x in hidden]


def oracle_layer(c: ModelConfig, w: dict[str, Float64], x: Float64) -> Float64:
    """One decoder layer over a whole sequence, (T, D) -> (T, D)."""
    num, heads, kv_heads, dim = len(x), c.num_attention_heads, c.num_key_value_heads, c.head_dim
    h = rms_norm(x, w["input_layernorm"], c.rms_norm_eps)
    q = rotate((h @ w["q_proj"].T).reshape(num, heads, dim), c.rope_theta)
    k = rotate((h @ w["k_proj"].T).reshape(num, kv_heads, dim), c.rope_theta)
    v = (h @ w["v_proj"].T).reshape(num, kv_heads, dim)
    k, v = (np.repeat(m, heads // kv_heads, axis=1) for m in (k, v))  # (T, H, d)
    future = np.triu(np.full((num, num), -np.inf), k=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim) + future  # (H, T, T)
    attended = np.einsum("hts,shd->thd", softmax(scores), v).reshape(num, -1)
    x = x + attended @ w["o_proj"].T
    h = rms_norm(x, w["post_attention_layernorm"], c.rms_norm_eps)
    gate = h @ w["gate_proj"].T
    return x + (gate / (1 + np.exp(-gate)) * (h @ w["up_proj"].T)) @ w["down_proj"].T


def our_logits(path: Path, cache_dir: Path, sequences: list[list[int]]) -> list[Float64]:
    """(T, V) for each sequence, from packed shards through the kernel: one group, one batch."""
    packed = open_packed(path, cache_dir)
    config = ModelConfig.from_dict(packed.manifest.config)
    group = LayerGroup.load(
        config,
        packed.manifest,
        0,
        config.num_hidden_layers,
        packed.read_shard,
        first=True,
        last=True,
        backend=pick_backend(),
    )
    batch = [SequenceSlice(group.new_cache(), 0, len(ids)) for ids in sequences]
    hidden = group.forward(group.embed(np.concatenate(sequences).astype(np.int32)), batch)
    logits = group.logits(hidden).astype(np.float64)
    return np.split(logits, np.cumsum([len(ids) for ids in sequences])[:-1])


def log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Quality:
    """How far our logits are from the oracle's, over NUM_POSITIONS positions of one text."""

    mean_kl: float
    max_kl: float
    top1: float
    loss: float
    oracle_loss: float


def compare(ours: Float64, oracle: Float64, next_ids: list[int]) -> Quality:
    """Compare logits (T, V) at the positions that predict `next_ids` (T,)."""
    ours, oracle = log_softmax(ours), log_softmax(oracle)
    kl = (np.exp(oracle) * (oracle - ours)).sum(axis=-1)  # (T,)
    at = np.arange(len(next_ids))
    return Quality(
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1=float((oracle.argmax(axis=-1) == ours.argmax(axis=-1)).mean()),
        loss=float(-ours[at, next_ids].mean()),
        oracle_loss=float(-oracle[at, next_ids].mean()),
    )


@pytest.fixture(scope="module")
def qualities(
    real_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Quality]:
    """Of the model's own answer to a question, and of texts of several kinds."""
    description = read_gguf(real_model_path)
    tokenizer = Tokenizer.from_vocabulary(description.vocabulary)
    template = ChatTemplate(description.chat_template or "")
    prompt = tokenizer.encode(template.render([ChatMessage("user", QUESTION)]), parse_special=True)
    texts = {
        "chat": prompt + tokenizer.encode(ANSWER, parse_special=False)[:NUM_POSITIONS],
        **{
            name: tokenizer.encode(text, parse_special=False)[: NUM_POSITIONS + 1]
            for name, text in FOREIGN.items()
        },
    }
    assert all(len(ids) > NUM_POSITIONS for ids in texts.values())

    sequences = [ids[:-1] for ids in texts.values()]
    oracle = oracle_logits(description, sequences)
    ours = our_logits(real_model_path, tmp_path_factory.mktemp("cache"), sequences)

    found = {
        name: compare(mine[-NUM_POSITIONS:], theirs[-NUM_POSITIONS:], ids[-NUM_POSITIONS:])
        for (name, ids), mine, theirs in zip(texts.items(), ours, oracle, strict=True)
    }
    for name, q in found.items():
        print(
            f"\n{name}, {NUM_POSITIONS} positions: mean KL {q.mean_kl:.5f}, max KL {q.max_kl:.5f},"
            f" top-1 agreement {q.top1:.1%}, loss {q.loss:.4f} (oracle {q.oracle_loss:.4f})"
        )
    return found


@pytest.mark.real_model
def test_our_distributions_are_the_oracles_on_every_kind_of_text(
    qualities: dict[str, Quality],
) -> None:
    for name, quality in qualities.items():
        assert quality.mean_kl < MAX_MEAN_KL, name
        assert abs(quality.loss - quality.oracle_loss) < 0.02, name


@pytest.mark.real_model
def test_our_likeliest_token_is_the_oracles_on_the_pool_of_texts(
    qualities: dict[str, Quality],
) -> None:
    # Where the model itself is unsure, any rounding tips the balance: one text of 64 positions
    # says little, the pool is what counts.
    assert len(qualities) >= 4
    assert np.mean([quality.top1 for quality in qualities.values()]) > MIN_TOP1


@pytest.mark.real_model
def test_the_oracle_itself_reads_english(qualities: dict[str, Quality]) -> None:
    # Without this, two wrong readings of the file could agree: a wrong rotation costs 2 nats.
    assert qualities["prose"].oracle_loss < 4.0
    assert qualities["chat"].oracle_loss < 1.0
