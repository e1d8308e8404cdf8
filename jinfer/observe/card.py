"""A model's card: what `jinfer inspect` says of a checkpoint without loading its weights or JAX."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinfer.config import EngineConfig
from jinfer.config.model import ModelConfig
from jinfer.errors import TokenizerError
from jinfer.kv.cache import cache_groups, longest_sequence
from jinfer.tokenizer import Tokenizer, load_tokenizer
from jinfer.tokenizer.folder import read_folder
from jinfer.tokenizer.gguf_vocab import open_vocabulary
from jinfer.weights.checkpoint import TensorReader, open_checkpoint

KINDS = ("embedding", "attention", "feed-forward", "experts", "router", "norms", "head", "other")
PAGE = EngineConfig().page_size
CACHE_BYTES = 2  # bfloat16
SHARE = 0.9  # of the memory; the rest is for programs' temporaries and the runtime
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What fits beside the weights: weights in `dtype`, KV in bfloat16, SHARE of `memory` bytes used.

    Attributes:
      weight_bytes: of all parameters. sequences: equal ones at a time.
      context: tokens of each, at most the model's; None: not even the weights fit.
    """

    memory: int
    dtype: str
    weight_bytes: int
    sequences: int
    context: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """Attributes:
    config: everything that config.json or the GGUF metadata says.
    layers: kinds of layers, described -> how many.
    parameters: of each of KINDS. active: parameters one token meets (its experts, not all).
    stored: bytes by stored type. files: bytes of the files that hold tensors.
    cache: bytes a token takes in bfloat16, by described group of layers.
    tokenizer, chat_template, vocabulary: kind, source, size; None is unknown or absent, `problem` then says more.
    end_tokens: id -> text.
    """

    path: Path
    config: ModelConfig
    layers: dict[str, int]
    parameters: dict[str, int]
    active: int
    stored: dict[str, int]
    files: int
    cache: dict[str, int]
    fits: tuple[Fit, ...]
    tokenizer: str | None
    vocabulary: int | None
    chat_template: str | None
    end_tokens: dict[int, str | None]
    problem: str | None

    @property
    def total(self) -> int:
        return sum(self.parameters.values())


def read_card(path: Path, memories: Sequence[int]) -> Card:
    """The card of the model at `path`, with what fits into each of `memories` bytes.

    Raises ConfigError or CheckpointError for a model that cannot be opened; a tokenizer that cannot be read is part
    of the card.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    parameters = count_parameters(checkpoint.reader)
    if config.tie_embeddings:
        parameters["head"] = 0  # some exporters write the embedding twice; it is loaded once
    total, routed = sum(parameters.values()), parameters["experts"]
    idle = routed - routed * config.experts.active // config.experts.count if config.experts else 0
    tokenizer, template, problem = _tokenizer(path)
    eos = tuple(dict.fromkeys(config.eos_ids + (tokenizer.eos_ids if tokenizer else ())))
    return Card(
        path=path, config=config,
        layers=dict(collections.Counter(_describe(config, kind.window, kind.dense, kind.local_rope)
                                        for kind in config.layer_kinds)),
        parameters=parameters, active=total - idle, stored=checkpoint.reader.bytes_by_dtype(), files=_file_bytes(path),
        cache={_group(g.layers, g.window): g.layers * g.width * CACHE_BYTES for g in cache_groups(config)},
        fits=tuple(_fits(config, total, memories)),
        tokenizer=None if tokenizer is None else _kind(path, tokenizer),
        vocabulary=None if tokenizer is None else tokenizer.vocab_size, chat_template=template,
        end_tokens={i: _text(tokenizer, i) for i in eos}, problem=problem)


def count_parameters(reader: TensorReader) -> dict[str, int]:
    """Numbers in the tensors of each of KINDS."""
    counts = dict.fromkeys(KINDS, 0)
    for name in reader.names():
        counts[kind_of(name)] += math.prod(reader.shape(name))
    return counts


def kind_of(name: str) -> str:
    """Which of KINDS a tensor is, by its Hugging Face name."""
    if "norm" in name:
        return "norms"
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if name.startswith("lm_head."):
        return "head"
    if ".self_attn." in name:
        return "attention"
    if ".experts." in name:
        return "experts"
    if any(part in name for part in (".mlp.gate.", ".mlp.router.", ".block_sparse_moe.gate.")):
        return "router"
    return "feed-forward" if ".mlp." in name else "other"


def _describe(config: ModelConfig, window: int | None, dense: bool, local_rope: bool) -> str:
    attention = "latent attention" if config.latent else "attention"
    parts = [f"full {attention}" if window is None else f"{attention} over {window:,} positions"]
    if config.experts:
        parts.append("dense" if dense else f"{config.experts.active} of {config.experts.count} experts")
    return ", ".join([*parts, "its own rotation"] if local_rope else parts)


def _group(layers: int, window: int | None) -> str:
    return f"{layers} layers, " + ("every position" if window is None else f"the last {window:,} positions")


def _fits(config: ModelConfig, parameters: int, memories: Sequence[int]) -> Iterable[Fit]:
    groups = cache_groups(config)
    for memory in memories:
        for dtype, size in WEIGHT_BYTES.items():
            weights = parameters * size
            left = int(memory * SHARE) - weights
            for sequences in (1, 8, 64):
                context = None if left < 0 else longest_sequence(
                    groups, left // CACHE_BYTES // sequences, PAGE, config.max_context)
                yield Fit(memory, dtype, weights, sequences, context)


def _file_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    orbax = [file for file in (path / "orbax").rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in orbax or path.glob("*.safetensors"))


def _tokenizer(path: Path) -> tuple[Tokenizer | None, str | None, str | None]:
    """The tokenizer, the source of its chat template, and what kept it from being read."""
    try:
        templates = read_folder(path).templates if path.is_dir() else open_vocabulary(path).templates()
        tokenizer = load_tokenizer(path)
    except TokenizerError as error:
        return None, None, " ".join(str(error).split())
    template = templates.get("default") or next(iter(templates.values()), None)
    return tokenizer, template, None


def _kind(path: Path, tokenizer: Tokenizer) -> str:
    if path.is_file():
        vocab = open_vocabulary(path)
        source = "in the file, " + ("" if vocab.metadata.get("tokenizer.ggml.model") == "gpt2" else "sentencepiece, ")
    elif (path / "tokenizer.json").is_file():
        source = "tokenizer.json, "
    else:
        source = "sentencepiece, "
    pieces = "byte-level" if tokenizer.rules.byte_level else (
        "byte fallback" if tokenizer.rules.byte_ids else "no byte fallback")
    return f"{source}{pieces}, {'adds' if tokenizer.add_bos else 'does not add'} the beginning token"


def _text(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    if tokenizer is None:
        return None
    special = next((text for text, i in tokenizer.specials.items() if i == token_id), None)
    return special or tokenizer.token_bytes(token_id).decode("utf-8", "replace") or None


def as_json(card: Card) -> dict[str, Any]:
    """The card as plain values."""
    return dataclasses.asdict(card) | {"path": str(card.path), "total": card.total}
