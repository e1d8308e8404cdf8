"""MXFP4 and block-scaled FP8 weights: decoded parts against float64 decoders written from the formats."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer.errors import CheckpointError, ConfigError
from jinfer.weights import open_checkpoint
from jinfer.weights.packed import Fp8Reader, decode_mxfp4
from jinfer.weights.safetensors import SafetensorsReader

DATA = Path(__file__).parents[1] / "data"
OSS, PLAIN = DATA / "models/gpt_oss_mxfp4", DATA / "models/llama_plain"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
STORED = load_file(OSS / "model.safetensors")


def fp4_oracle(blocks, scales):
    """[E, out, n, 16], [E, out, n] -> [E, in, out] float64, one bit field at a time."""
    experts, rows, count, half = blocks.shape
    values = np.zeros((experts, rows, count * 2 * half))
    for at in np.ndindex(blocks.shape):
        for which in (0, 1):
            code = int(blocks[at]) >> 4 * which & 15
            sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
            size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
            values[at[0], at[1], at[2] * 32 + 2 * at[3] + which] = (-1) ** sign * size * 2.0 ** (int(scales[at[:3]]) - 127)
    return values.swapaxes(1, 2)


def fp8_oracle(stored, scales, block):
    """Row by row, from the bits of E4M3 (bias 7, no infinities)."""
    bits = stored.view(np.uint8).astype(int)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)
    size = np.where(bits >> 7, -size, size)
    return np.array([[size[i, j] * float(scales[i // block[0], j // block[1]]) for j in range(size.shape[1])]
                     for i in range(size.shape[0])])


def test_mxfp4_is_what_transformers_decodes():
    case = json.loads((DATA / "quant/mxfp4.json").read_text())
    blocks, scales = (np.array(case[key], np.uint8) for key in ("blocks", "scales"))
    np.testing.assert_array_equal(decode_mxfp4(blocks, scales).swapaxes(1, 2), np.array(case["values"], np.float32))
    np.testing.assert_array_equal(fp4_oracle(blocks, scales), np.array(case["values"]))


def test_mxfp4_tensors_are_shown_plain():
    checkpoint = open_checkpoint(OSS)
    names = checkpoint.reader.names()
    assert GATE_UP in names
    assert not [name for name in names if name.endswith(("_blocks", "_scales"))]
    assert checkpoint.reader.shape(GATE_UP) == (4, 32, 64)
    assert checkpoint.reader.nbytes() == sum(array.nbytes for array in STORED.values())
    np.testing.assert_array_equal(checkpoint.reader.read("model.norm.weight", (slice(3, 9),)), STORED["model.norm.weight"][3:9])


@pytest.mark.parametrize("index", [
    (), (slice(1, 2),), (slice(0, 4), slice(5, 30)), (slice(2, 4), slice(31, 32), slice(7, None)),
    (slice(None), slice(None), slice(0, 0))])
def test_parts_of_mxfp4(index):
    want = fp4_oracle(STORED[f"{GATE_UP}_blocks"], STORED[f"{GATE_UP}_scales"])[index]
    got = open_checkpoint(OSS).reader.read(GATE_UP, index)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


def test_parts_across_mxfp4_blocks(tmp_path):
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 3, 4, 16), np.uint8), rng.integers(100, 140, (2, 3, 4), np.uint8)
    shutil.copy(OSS / "config.json", tmp_path)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    reader, want = open_checkpoint(tmp_path).reader, fp4_oracle(blocks, scales)
    for start, stop in ((0, 128), (31, 33), (32, 64), (60, 128), (5, 6)):
        np.testing.assert_array_equal(reader.read("w", (slice(1, 2), slice(start, stop))), want[1:2, start:stop])


def test_only_the_wanted_experts_are_read(monkeypatch):
    reader, asked = open_checkpoint(OSS).reader, []
    read = SafetensorsReader.read
    monkeypatch.setattr(SafetensorsReader, "read", lambda self, name, index=(): asked.append(
        (name, out := read(self, name, index))) or out)
    reader.read(GATE_UP, (slice(2, 3), slice(0, 16), slice(10, 12)))
    assert {name: part.shape for name, part in asked} == {
        f"{GATE_UP}_blocks": (1, 2, 1, 16), f"{GATE_UP}_scales": (1, 2, 1)}


@pytest.mark.parametrize(("change", "named"), [
    (lambda t: t.pop(f"{GATE_UP}_scales"), "gate_up_proj_blocks: has no"),
    (lambda t: t.pop(f"{GATE_UP}_blocks"), "gate_up_proj_scales: has no"),
    (lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, :5]}), "not MXFP4"),
    (lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"][..., :8]}), "not MXFP4"),
    (lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"].astype(np.float32)}), "unsupported type F32"),
    (lambda t: t.update({"model.norm.weight": np.ones(32, np.uint8)}), "model.norm.weight has the unsupported type U8"),
])
def test_broken_mxfp4(tmp_path, change, named):
    tensors = dict(STORED)
    change(tensors)
    shutil.copy(OSS / "config.json", tmp_path)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


BLOCK = (16, 12)  # does not divide the shapes below
UP = "model.layers.1.mlp.up_proj.weight"  # [48, 32]
DOWN = "model.layers.1.mlp.down_proj.weight"  # [32, 48]


@pytest.fixture
def fp8(tmp_path):
    """llama_plain with two matrices in 8 bits: writes it (after `change`), returns its folder and tensors."""

    def write(change=lambda tensors: None, block=BLOCK):
        tensors, rng = load_file(PLAIN / "model.safetensors"), np.random.default_rng(1)
        for name in (UP, DOWN):
            rows, columns = tensors[name].shape
            scales = rng.uniform(0.01, 0.1, (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))).astype(np.float32)
            tensors[name] = rng.normal(0, 20, (rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scales
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        config = json.loads((PLAIN / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                         "weight_block_size": list(block)}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path, tensors

    return write


@pytest.mark.parametrize("index", [
    (), (slice(15, 17),), (slice(None), slice(11, 13)), (slice(20, 31), slice(24, None)), (slice(3, 3),)])
def test_fp8_parts(fp8, index):
    folder, tensors = fp8()
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint.reader, Fp8Reader)
    assert sorted(checkpoint.reader.names()) == sorted(load_file(PLAIN / "model.safetensors"))
    for name in (UP, DOWN):
        want = fp8_oracle(tensors[name], tensors[name + "_scale_inv"], BLOCK)[index]
        assert checkpoint.reader.shape(name) == tensors[name].shape
        got = checkpoint.reader.read(name, index)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-7)
    np.testing.assert_array_equal(checkpoint.reader.read("lm_head.weight", index[:1]), tensors["lm_head.weight"][index[:1]])


@pytest.mark.parametrize(("change", "block", "named"), [
    (lambda t: t.pop(UP + "_scale_inv"), BLOCK, "up_proj.weight: has no"),
    (lambda t: None, (16, 16), "does not fit"),
    (lambda t: t.update({"model.norm.weight": np.ones(32, np.uint8)}), BLOCK, "unsupported type U8"),
])
def test_broken_fp8(fp8, change, block, named):
    folder, _ = fp8(change, block)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(folder)


def test_a_scale_of_nothing_reaches_the_loader(fp8):
    folder, _ = fp8(lambda tensors: tensors.update({"x.weight_scale_inv": np.ones((1, 1), np.float32)}))
    assert "x.weight_scale_inv" in open_checkpoint(folder).reader.names()


def test_packed_tensors_without_a_packing_are_refused(fp8):
    folder, _ = fp8()
    shutil.copy(PLAIN / "config.json", folder)
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        open_checkpoint(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", None])
def test_other_packings_are_refused_by_name(fp8, method):
    folder, _ = fp8()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"quantization_config: quant_method: {method!r} is not supported"):
        open_checkpoint(folder)


def test_layers_that_guess_further_tokens_are_not_shown(tmp_path):
    """DeepSeek-V3's come after the model's own layers."""
    source = DATA / "models/deepseek_v3"
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    assert sorted(open_checkpoint(tmp_path).reader.names()) == sorted(tensors)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert "model.layers.3.eh_proj.weight" in open_checkpoint(tmp_path).reader.names()
