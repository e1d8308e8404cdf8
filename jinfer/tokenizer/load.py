"""load_tokenizer: finds the tokenizer of a model on disk."""

from pathlib import Path

from jinfer.errors import TokenizerError
from jinfer.tokenizer.gguf_vocab import load_gguf
from jinfer.tokenizer.hf import load_hf
from jinfer.tokenizer.spm import load_spm
from jinfer.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer at `path`: a model folder, a .gguf file, a sentencepiece .model file or a tokenizer.json.

    In a folder tokenizer.json comes first, then tokenizer.model, then the only *.model file. TokenizerError
    with one line if there is none, or it is broken or of an unsupported kind.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise TokenizerError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        return load_gguf(path)
    if path.suffix == ".json":
        return load_hf(path)
    if ".model" in path.suffixes:  # Mistral names its files tokenizer.model.v3
        return load_spm(path)
    raise TokenizerError(f"{path}: not a tokenizer; expected a folder, a .gguf, .model or .json file")


def _load_folder(path: Path) -> Tokenizer:
    if (path / "tokenizer.json").is_file():
        return load_hf(path / "tokenizer.json")
    if (path / "tokenizer.model").is_file():
        return load_spm(path / "tokenizer.model")
    models = sorted(file for file in path.iterdir() if file.is_file() and ".model" in file.suffixes)
    if len(models) == 1:
        return load_spm(models[0])
    if models:
        names = ", ".join(file.name for file in models)
        raise TokenizerError(f"{path}: several sentencepiece models: {names}")
    if (path / "tekken.json").is_file():
        raise TokenizerError(f"{path}: tekken.json is not supported; use the model's tokenizer.json")
    raise TokenizerError(f"{path}: holds no tokenizer.json and no *.model file")
