"""A Hugging Face folder as a `ModelDescription`: config, safetensors, tokenizer, chat template.

Knows no chunk layout. What the kernel could not run exactly is refused by name before a tensor is
read: other architectures, other quantisations, experts, tensors that are missing or left over.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shared.errors import ModelError
from shared.formats.description import ModelDescription
from shared.formats.folder_text import read_folder_text, read_json
from shared.formats.hf_config import architecture_of, read_hf_config
from shared.formats.placement import place_tensors
from shared.formats.safetensors_file import open_folder

CONFIG_FILE = "config.json"
TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
)
_TABLES = ".rotary_emb.inv_freq"  # rope, as old folders have it: made from the config anyway


def read_folder(folder: Path) -> ModelDescription:
    """Describe the model in a folder. Tensors are read when their views are asked to.

    Raises `ModelError` naming what cannot be used: the file, a key, or a tensor and its type.
    """
    raw = read_json(folder, CONFIG_FILE)
    if raw is None:
        raise ModelError(f"{folder} has no {CONFIG_FILE}", remedy="give a whole model folder")
    config = read_hf_config(raw, CONFIG_FILE)
    tied_head = "lm_head.weight" if config.tie_word_embeddings else None  # a copy of the embedding
    tensors = {
        name: tensor
        for name, tensor in open_folder(folder).tensors.items()
        if name != tied_head and not name.endswith(_TABLES)
    }
    views = place_tensors(
        folder_name(folder), architecture_of(raw, CONFIG_FILE), config, "hf", tensors
    )
    text = read_folder_text(folder, config.vocab_size)
    return ModelDescription(
        source=folder_name(folder),
        config=replace(
            config,
            bos_token_id=text.vocabulary.bos_token_id,
            eos_token_ids=text.eos_token_ids,
        ),
        tensors=views,
        vocabulary=text.vocabulary,
        chat_template=text.chat_template,
    )


def folder_files(folder: Path) -> list[Path]:
    """The files that a description is made of, config first. Raises as `open_folder` does."""
    text = [folder / name for name in (CONFIG_FILE, *TEXT_FILES)]
    return [*(path for path in text if path.is_file()), *open_folder(folder).files]


def folder_name(folder: Path) -> str:
    """The folder's name; of a snapshot in the hub's cache (models--ORG--NAME/snapshots/REVISION)
    the model's."""
    path = folder.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name
