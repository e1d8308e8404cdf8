"""GGUF files: block layouts (case C32), llama names and row order, slices, broken files."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from jinfer.errors import CheckpointError
from jinfer.weights import open_checkpoint
from jinfer.weights.gguf import GgufReader
from jinfer.weights.gguf_meta import read_head, read_metadata
from tests.weights.gguf_files import LLAMA_PLAIN, write_gguf, write_llama

DATA = Path(__file__).parents[1] / "data"
BLOCKS = json.loads((DATA / "quant/gguf_blocks.json").read_text())
PLAIN = load_file(DATA / "models/llama_plain/model.safetensors")
BIASED = load_file(DATA / "models/llama_bias/model.safetensors")
WRITABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def reader_of(path):
    return GgufReader(path, read_head(path))


@pytest.mark.parametrize("name", BLOCKS)
def test_block_layouts(tmp_path, name):
    """Values from an independent formula; rows, columns and blocks must not run into each other."""
    case = BLOCKS[name]
    first, second = np.frombuffer(bytes.fromhex(case["hex"]), np.uint8).reshape(2, -1)
    one, two = np.asarray(case["values"], np.float64).reshape(2, -1)
    raw = np.stack([np.concatenate(pair) for pair in ((first, second), (second, first), (first, first))])
    want = np.stack([np.concatenate(pair) for pair in ((one, two), (two, one), (one, one))])
    reader = reader_of(write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (raw, Kind[name])}))
    tensor, size = "model.layers.0.mlp.up_proj.weight", len(one)
    assert reader.shape(tensor) == (3, 2 * size)
    got = reader.read(tensor)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-6)
    for columns in (slice(size, None), slice(0, size), slice(size - 3, size + 5), slice(1, 2)):
        np.testing.assert_array_equal(reader.read(tensor, (slice(1, 3), columns)), got[1:3, columns])


def test_q5_1_layout(tmp_path):
    """Not in the shared table: the published formula, element by element."""
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (2, 24), dtype=np.uint8)
    raw[:, :4] = np.asarray([[0.5, -1.25], [0.125, 3.0]], np.float16).view(np.uint8)
    want = np.zeros((2, 32))
    for row in range(2):
        scale, minimum = raw[row, :4].view(np.float16).astype(float)
        high = int.from_bytes(raw[row, 4:8].tobytes(), "little")
        for i, byte in enumerate(raw[row, 8:]):
            want[row, i] = scale * ((byte & 15) | (high >> i & 1) << 4) + minimum
            want[row, i + 16] = scale * ((byte >> 4) | (high >> (i + 16) & 1) << 4) + minimum
    reader = reader_of(write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (raw, Kind.Q5_1)}))
    np.testing.assert_allclose(reader.read("model.layers.0.mlp.up_proj.weight"), want, atol=1e-6)


@pytest.mark.parametrize("kind", WRITABLE)
def test_round_trip(tmp_path, kind):
    """Whole and sliced reads equal what the package decodes, with q and k back in half-split order."""
    path, want = write_llama(tmp_path / "m.gguf", PLAIN, kind)
    reader = open_checkpoint(path).reader
    assert sorted(reader.names()) == sorted(PLAIN)
    rng = np.random.default_rng(1)
    for name, values in want.items():
        assert reader.shape(name) == PLAIN[name].shape
        got = reader.read(name)
        np.testing.assert_array_equal(got.astype(np.float32), values, err_msg=name)
        for _ in range(5):
            starts = [int(rng.integers(0, size)) for size in values.shape]
            index = tuple(slice(start, int(rng.integers(start, size)) + 1)
                          for start, size in zip(starts, values.shape, strict=True))
            np.testing.assert_array_equal(reader.read(name, index), got[index], err_msg=f"{name} {index}")
            np.testing.assert_array_equal(reader.read(name, index[:1]), got[index[:1]], err_msg=name)


def test_float32_file_equals_the_safetensors_it_came_from(tmp_path):
    path, _ = write_llama(tmp_path / "m.gguf", BIASED)
    reader = open_checkpoint(path).reader
    for name, want in BIASED.items():  # biases of q and k are reordered too
        np.testing.assert_array_equal(reader.read(name), want, err_msg=name)
    half = reader.read("model.layers.0.self_attn.q_proj.bias", (slice(16, 32),))
    np.testing.assert_array_equal(half, BIASED["model.layers.0.self_attn.q_proj.bias"][16:])


@pytest.mark.parametrize(("kind", "stored", "dtype"), [
    (Kind.F32, "float32", np.float32), (Kind.F16, "float16", np.float16),
    (Kind.BF16, "bfloat16", ml_dtypes.bfloat16), (Kind.Q8_0, "quantized", np.float32)])
def test_dtypes(tmp_path, kind, stored, dtype):
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN, kind)
    checkpoint = open_checkpoint(path)
    assert checkpoint.stored_dtype == stored
    assert checkpoint.reader.read("lm_head.weight").dtype == dtype
    assert checkpoint.reader.read("model.norm.weight").dtype == np.float32
    sizes = gguf.GGUFReader(path).tensors
    assert checkpoint.reader.nbytes() == sum(int(tensor.n_bytes) for tensor in sizes)


def test_unsupported_types_are_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"output.weight": (np.zeros((1, 84), np.uint8), Kind.Q2_K)})
    with pytest.raises(CheckpointError, match=r"output\.weight.*Q2_K.*Q6_K"):
        reader_of(path)


def test_unknown_tensors_keep_their_names_for_the_loader_to_refuse(tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN, extra=extra)
    assert "blk.0.attn_q_norm.weight" in open_checkpoint(path).reader.names()


def test_missing_tensor_is_named(tmp_path):
    path, _ = write_llama(tmp_path / "m.gguf", {k: v for k, v in PLAIN.items() if k != "model.norm.weight"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        open_checkpoint(path).reader.read("model.norm.weight")


def test_every_truncation_is_refused(tmp_path):
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN, Kind.Q8_0,
                          metadata=LLAMA_PLAIN | {"tokenizer.ggml.tokens": ["a", "b", "c"]})
    whole = path.read_bytes()
    first = min(tensor.offset for tensor in read_head(path).tensors.values())
    cuts = [*range(0, first, 37), first, first + 1, len(whole) // 2]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert "m.gguf" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("offset", "data", "message"), [
    (0, b"GGML", "bad magic"),
    (4, b"\x01\x00\x00\x00", "version 1"),
    (4, b"\x00\x00\x00\x03", "big-endian"),
    (8, b"\xff" * 8, "truncated"),
    (16, b"\xff" * 8, "truncated"),
    (24, b"\xff" * 8, "truncated"),
])
def test_broken_heads(tmp_path, offset, data, message):
    path, _ = write_llama(tmp_path / "m.gguf", PLAIN)
    whole = path.read_bytes()
    path.write_bytes(whole[:offset] + data + whole[offset + len(data):])
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_metadata_values(tmp_path):
    metadata = {"a.int": 7, "a.float": 0.5, "a.bool": True, "a.text": "é漢😀", "a.ints": [1, 2, 3],
                "a.texts": ["x", "", "Ġy"], "a.floats": [0.25, -1.0]}
    got = read_metadata(write_gguf(tmp_path / "m.gguf", {"t": np.zeros((2, 3), np.float32)}, metadata))
    assert {key: got[key] for key in metadata} == metadata
    assert read_head(tmp_path / "m.gguf").tensors["t"].shape == (2, 3)


def test_absent_file(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_metadata(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="bad magic"):
        read_metadata(tmp_path / "empty.gguf")
