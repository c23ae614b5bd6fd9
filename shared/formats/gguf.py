"""A GGUF file as a `ModelDescription`. Knows no chunk layout and no tokenizer.

What the kernel could not run exactly is refused by name: other architectures, other quantisations,
experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shared.formats.description import ModelDescription
from shared.formats.gguf_config import ROPE_TENSORS, WORD, gguf_architecture, read_gguf_config
from shared.formats.gguf_file import open_gguf
from shared.formats.gguf_vocabulary import read_gguf_vocabulary
from shared.formats.keys import Keys
from shared.formats.placement import place_tensors


def read_gguf(path: Path) -> ModelDescription:
    """Describe the model in a GGUF file. Tensors are read when their views are asked to.

    Raises `ModelError` naming what cannot be used: the file, a key, or a tensor and its type.
    """
    file = open_gguf(path)
    config = read_gguf_config(file)
    tensors = {name: t for name, t in file.tensors.items() if name not in ROPE_TENSORS}
    vocabulary = read_gguf_vocabulary(file, config.vocab_size)
    # A file may leave out what its kind of tokenizer has anyway.
    ends = (*config.eos_token_ids, vocabulary.eos_token_id)
    config = replace(
        config,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
    )
    return ModelDescription(
        source=path.name,
        config=config,
        tensors=place_tensors(path.name, gguf_architecture(file), config, "gguf", tensors),
        vocabulary=vocabulary,
        chat_template=Keys(path.name, WORD, file.metadata, "tokenizer.").optional(
            "chat_template", str
        ),
    )
