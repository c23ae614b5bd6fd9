"""The tiny random model of `tests/rig.py`, and what one undisturbed process makes of a prompt."""

from __future__ import annotations

from functools import cache

from services.chaos.reference import ReferenceModel
from shared.api.model import ApiModel
from shared.messages import SamplingParams
from shared.model.backend import pick_backend
from shared.model.layer_group import LayerGroup
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from shared.topology import Layout, Wire, even_layout
from tests.gguf_files import CHAT_TEMPLATE, tiny_tokens, tiny_vocabulary
from tests.tiny_model import TinyModel, tiny_model

# A token a step: what tests count. Speculation has tests of its own.
GREEDY = SamplingParams(seed=0, max_tokens=12, ignore_eos=True, speculation=False)
SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    seed=7,
    max_tokens=12,
    ignore_eos=True,
    speculation=False,
)


@cache
def rig_model() -> TinyModel:
    return tiny_model(vocab_size=len(tiny_tokens()))


@cache
def rig_layer_group(num_groups: int, group: int) -> LayerGroup:
    """Shared by all rigs: it holds nothing of a sequence."""
    model = rig_model()
    layout = even_layout(model.manifest.model_id, model.config.num_hidden_layers, num_groups)
    return load_group(model, layout, group)


def load_group(model: TinyModel, layout: Layout, group: int) -> LayerGroup:
    first, end = layout.bounds[group]
    return LayerGroup.load(
        model.config,
        model.manifest,
        first,
        end,
        model.read_shard,
        first=group == 0,
        last=group == layout.last_group,
        backend=pick_backend(),
    )


@cache
def expected_tokens(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    num_groups: int = 1,
    wire: Wire = Wire.F32,
) -> list[int]:
    """What one undisturbed process generates; the number of groups counts where a wire rounds."""
    model = rig_model()
    layout = even_layout(
        model.manifest.model_id, model.config.num_hidden_layers, num_groups, wire=wire
    )
    reference = ReferenceModel(model.manifest, model.read_shard, layout=layout)
    return reference.generate(prompt, sampling)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt of byte tokens, another for every salt."""
    return tuple(3 + (7 * salt + 31 * i + i * i) % 250 for i in range(length))


@cache
def rig_tokenizer() -> Tokenizer:
    return Tokenizer.from_vocabulary(tiny_vocabulary())


def rig_api_model() -> ApiModel:
    """The tiny model as an API knows it."""
    model = rig_model()
    return ApiModel(
        tokenizer=rig_tokenizer(),
        chat_template=ChatTemplate(CHAT_TEMPLATE),
        model_id=model.manifest.model_id,
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_position_embeddings,
    )
