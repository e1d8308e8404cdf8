"""A Hugging Face folder's config.json and generation_config.json -> ModelConfig.

Old keys and those of transformers 5 are both read. Whatever would change the maths and is not known is refused
by name.
"""

from pathlib import Path

from jinfer.config.model import ModelConfig
from jinfer.weights.hf_families import ARCHITECTURES, Architecture
from jinfer.weights.hf_rope import context_length
from jinfer.weights.hf_section import Section
from jinfer.weights.hf_storage import read_storage
from jinfer.weights.hf_text import text_section


def read_hf_config(folder: Path) -> ModelConfig:
    """ModelConfig of the model in `folder`. ConfigError names the file and the key."""
    main = text_section(Section(folder / "config.json"))
    architecture = _architecture(main)
    architecture.refuse_other_options(main)
    main = Section(main.path, architecture.shapes | {k: v for k, v in main.data.items() if v is not None
                                                     or k not in architecture.shapes})
    read_storage(main)  # packed weights of an unknown kind are refused here
    heads = main.integer("num_attention_heads")
    positions = main.integer("max_position_embeddings")
    fields = {
        "num_kv_heads": main.integer("num_key_value_heads", architecture.kv_heads or heads, null=heads),
        **architecture.options(main)}
    bos, eos = _special_tokens(folder, main, architecture)
    return ModelConfig(
        family=architecture.family,
        vocab_size=main.integer("vocab_size"),
        hidden_size=main.integer("hidden_size"),
        intermediate_size=main.integer("intermediate_size"),
        num_layers=main.integer("num_hidden_layers"),
        num_heads=heads,
        max_context=context_length(fields["rope"], positions),
        norm_eps=main.number("rms_norm_eps", architecture.norm_eps),
        tie_embeddings=main.flag("tie_word_embeddings", architecture.tied),
        bos_id=bos[0] if bos else None,
        eos_ids=eos,
        **fields,
    )


def _architecture(main: Section) -> Architecture:
    names, known = main.data.get("architectures"), ", ".join(ARCHITECTURES)
    if not names:
        kind = main.data.get("model_type")
        for architecture in ARCHITECTURES.values():
            if architecture.model_type == kind:
                return architecture
        main.fail("model_type", f"{kind!r} is not supported; supported architectures: {known}")
    if not isinstance(names, list) or names[0] not in ARCHITECTURES:
        main.fail("architectures", f"{names!r} is not supported; supported: {known}")
    return ARCHITECTURES[names[0]]


def _special_tokens(folder: Path, main: Section,
                    architecture: Architecture) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that begin and that end a sequence: of the two files united, else the architecture's."""
    path = folder / "generation_config.json"
    generation = Section(path) if path.exists() else main
    found = []
    for key, default in (("bos_token_id", architecture.bos), ("eos_token_id", architecture.eos)):
        ids = generation.token_ids(key) + main.token_ids(key)
        if not ids and key not in main.data and key not in generation.data:
            ids = default
        found.append(tuple(dict.fromkeys(ids)))
    # the configuration's beginning wins
    return (main.token_ids("bos_token_id") or found[0]), found[1]
