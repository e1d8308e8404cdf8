"""`jinfer inspect`: what a checkpoint is and what it needs, without loading it."""

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from jinfer.cli.options import Model
from jinfer.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from jinfer.observe.card import Card

Memory = Annotated[list[str] | None, typer.Option(
    "--memory", metavar="SIZE", help="Memory to fit into, e.g. 16GiB or 80GB (default: 8, 16, 80 GiB). Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_DEFAULT = ("8GiB", "16GiB", "80GiB")
_TEMPLATE_LINES = 4


def inspect(model: Model = "smollm2-135m", memory: Memory = None, as_json: AsJson = False) -> None:
    """Show a model's architecture, parameters, KV memory, the context that fits, chat template and end tokens.

    Example: jinfer inspect smollm2-135m --memory 4GiB
    """
    memories = [parse_size(text) for text in memory or _DEFAULT]
    from jinfer.cli.session import stderr_console
    from jinfer.observe.card import as_json as plain
    from jinfer.observe.card import read_card
    from jinfer.weights import resolve_model
    console = stderr_console()
    with console.status("finding the model"):
        path = resolve_model(model)
    card = read_card(path, memories)
    if as_json:
        print(json.dumps(plain(card), ensure_ascii=False))
        return
    _print(card)


def parse_size(text: str) -> int:
    """`16GiB`, `80GB`, `1.5T`, `1000` -> bytes. ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if not match or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"memory: must be a size like 16GiB or 80GB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _print(card: "Card") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(card):
        table.add_row(name, value)
    console.print(table)
    console.print()
    console.print(_fit_table(card))


def _rows(card: "Card") -> list[tuple[str, str]]:
    from rich.markup import escape

    from jinfer.observe.card import KINDS, PAGE
    c = card.config
    rows = [
        ("model", escape(str(card.path))),
        ("family", f"{c.family}: {c.num_layers} layers of width {c.hidden_size:,}, {c.num_heads} query and "
                   f"{c.num_kv_heads} kv heads of {c.head_dim}, feed-forward {c.intermediate_size:,}, "
                   f"{c.activation}, rope {c.rope.kind} {c.rope.theta:g}"),
        *(("layers", f"{count} x {kind}") for kind, count in card.layers.items()),
        ("context", f"{c.max_context:,} tokens"),
        ("parameters", f"{card.total:,}" + (f", {card.active:,} active" if card.active != card.total else "")),
        *((f"  {kind}", f"{card.parameters[kind]:,}") for kind in KINDS if card.parameters[kind]),
    ]
    if c.tie_embeddings and not card.parameters["head"]:
        rows.append(("  head", "the embedding"))
    by_type = ", ".join(f"{size / 1e6:,.1f} MB {dtype}" for dtype, size in card.stored.items())
    rows.append(("stored", f"{by_type}; files of {card.files / 1e6:,.1f} MB"))
    rows.append(("KV a token", f"{sum(card.cache.values()):,} bytes in bfloat16"))
    if len(card.cache) == 1:
        rows.append(("KV a page", f"{sum(card.cache.values()) * PAGE:,} bytes, {PAGE} tokens"))
    if len(card.cache) > 1 or c.latent or any(kind.window for kind in c.layers):
        latent = "one latent vector" if c.latent else "keys and values"
        rows += [(f"  {size:,} bytes", f"{group}, {latent}") for group, size in card.cache.items()]
    rows += [
        ("vocabulary", f"{c.vocab_size:,} rows" + (
            "" if card.vocabulary is None else f", {card.vocabulary:,} tokens in the tokenizer")),
        ("tokenizer", card.tokenizer or escape(f"unknown: {card.problem}")),
        ("end tokens", ", ".join(f"{i} {'(text unknown)' if text is None else escape(repr(text))}"
                                 for i, text in card.end_tokens.items()) or "none known"),
        ("chat template", _template(card)),
    ]
    return rows


def _template(card: "Card") -> str:
    from rich.markup import escape
    if card.chat_template is None:
        return "none" if card.problem is None else "unknown"
    lines = card.chat_template.splitlines()
    more = len(lines) - _TEMPLATE_LINES
    shown = [line if len(line) <= 100 else line[:97] + "..." for line in lines[:_TEMPLATE_LINES]]
    return escape("\n".join([*shown, *([f"... {more} more lines"] if more > 0 else [])]))


def _fit_table(card: "Card") -> "Table":
    from rich.table import Table

    from jinfer.observe.card import PAGE, SHARE
    counts = sorted({fit.sequences for fit in card.fits})
    table = Table(title="tokens of context each sequence gets", title_justify="left", caption_justify="left",
                  caption=f"One device; all weights in that type, KV in bfloat16 (pages of {PAGE}); {1 - SHARE:.0%} of "
                          f"the memory is left for temporaries. At most the model's {card.config.max_context:,}.")
    for name in ("memory", "weights", *(f"{n} sequence{'s' * (n > 1)}" for n in counts)):
        table.add_column(name, justify="right", no_wrap=True)
    for memory, dtype in dict.fromkeys((fit.memory, fit.dtype) for fit in card.fits):
        row = [fit for fit in card.fits if (fit.memory, fit.dtype) == (memory, dtype)]
        table.add_row(f"{memory / 2**30:,.1f} GiB", f"{dtype}, {row[0].weight_bytes / 2**30:,.2f} GiB",
                      *("too large" if fit.context is None else f"{fit.context:,}" for fit in row))
    return table
