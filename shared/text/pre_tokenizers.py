"""How byte-level vocabularies split a text before they merge it, by GGUF's name for it. Pure.

Each is a sequence of expressions: every one cuts what it matches out of the pieces so far. Sources:
the models' own `tokenizer.json` where they say it, else llama.cpp's table (src/llama-vocab.cpp).
A wrong split gives wrong ids without any other sign, so names that are not here are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# openai/gpt-2, src/encoder.py
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# openai/tiktoken, cl100k_base, as meta-llama/Meta-Llama-3-8B has it
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")  # Qwen/Qwen2-7B: digits one by one
_QWEN35 = (  # Qwen/Qwen3.5: marks stay with their letters
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# openai/tiktoken, o200k_base
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# mistralai/Mistral-Nemo-Base-2407
_TEKKEN = _GPT4O.replace(_CONTRACTION, "").replace("{1,3}", "")
_HANLESS_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HANLESS_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# moonshotai/Kimi-K2-Instruct, tokenization_kimi.py
KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HANLESS_UPPER}*{_HANLESS_LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HANLESS_UPPER}+{_HANLESS_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# deepseek-ai/DeepSeek-V3
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# deepseek-ai/deepseek-coder-6.7b-base
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct: letters that have cases, by their code points
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_CASED_RANGES = "".join(
    "-".join(chr(int(code, 16)) for code in part.split("-")) for part in _CASED.split()
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_RANGES}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` are applied in turn. `ignore_merges` takes a piece that is a token as it is;
    `add_bos` is what a model file means that does not say; `normalizer` as `tokenizer.json`."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: dict[str, Any] | None = field(default=None)

    def rules(self) -> dict[str, Any]:
        """As `tokenizer.json` spells it."""
        return split_rules(self.patterns)


def split_rules(patterns: tuple[str, ...]) -> dict[str, Any]:
    """The pre-tokenizer of some patterns, as `tokenizer.json` spells it."""
    splits = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _BYTES]}


_BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_NFC = {"type": "NFC"}
_gpt2 = PreTokenizer((_GPT2,))
_digits_then_gpt2 = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_llama3_merged = PreTokenizer((_LLAMA3,))
# Qwen's own files normalise; llama.cpp does not. The model was trained on the former.
_qwen2 = PreTokenizer((_QWEN2,), normalizer=_NFC)
_gpt4o = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "falcon": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2.removesuffix(r"|\s+"), r"[0-9][0-9][0-9]")
    ),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK_V3),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer((KIMI,), ignore_merges=True),
    "qwen35": PreTokenizer((_QWEN35,), normalizer=_NFC),
    "bailingmoe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
            r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "jais", "trillion"), _gpt2),
    **dict.fromkeys(("granite-docling", "a.x-4.0"), _gpt2),
    # GPT-NeoX's vocabulary, which normalises: EleutherAI/gpt-neox-20b
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((_GPT2,), normalizer=_NFC)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), _digits_then_gpt2),
    **dict.fromkeys(("exaone", "minerva-7b"), _digits_then_gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _llama3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _llama3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _llama3_merged),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _qwen2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _gpt4o),
}
