"""What a config.json says of the tensors beside it: how weights are packed, which tensors no model reads."""

from dataclasses import dataclass
from typing import Literal

from jinfer.weights.hf_section import Section
from jinfer.weights.hf_text import IGNORED, RENAMED, reads_images


@dataclass(frozen=True, slots=True)
class Packing:
    """Attributes:
    kind: `mxfp4`, blocks of 32 four-bit floats with a shared power of two (OCP Microscaling Formats 1.0); or
      `fp8`, 8-bit floats (E4M3) with a float32 scale for each block of rows and columns.
    block: fp8: rows and columns that share a scale.
    """

    kind: Literal["mxfp4", "fp8"]
    block: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Storage:
    """Attributes:
    packing: of weights; None where they are stored plainly.
    ignored: prefixes of tensors that are of no use here: DeepSeek-V3's layers that guess further tokens lie after
      the model's own, and a language model may lie beside what reads images.
    renamed: prefixes of the others, and what jinfer calls them.
    """

    packing: Packing | None
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def read_storage(main: Section) -> Storage:
    """ConfigError names what is not supported."""
    if reads_images(main):
        return Storage(_packing(main), IGNORED, RENAMED)
    layers = main.integer("num_hidden_layers")
    extra = main.count(main.either("num_nextn_predict_layers", "num_mtp_layers"), 0)
    return Storage(_packing(main), tuple(f"model.layers.{layers + i}." for i in range(extra)))


def _packing(main: Section) -> Packing | None:
    section = main.inner("quantization_config")
    if not section.data:
        return None
    method = section.data.get("quant_method")
    if method == "mxfp4":
        return Packing("mxfp4")
    if method != "fp8":
        section.fail("quant_method", f"{method!r} is not supported; supported: mxfp4, fp8")
    if section.data.get("fmt", "e4m3") != "e4m3":
        section.fail("fmt", f"{section.data['fmt']!r} is not supported; supported: e4m3")
    if section.data.get("activation_scheme", "dynamic") != "dynamic":
        section.fail("activation_scheme", f"{section.data['activation_scheme']!r} is not supported; supported: dynamic")
    block = section.data.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        section.fail("weight_block_size", f"must be two positive integers, got {block!r}")
    return Packing("fp8", (block[0], block[1]))
