"""Tokenizers: tokenizer.json, sentencepiece and GGUF vocabularies; streaming decoder; chat templates."""

from jinfer.tokenizer.chat import ChatTemplate
from jinfer.tokenizer.detok import StreamDecoder
from jinfer.tokenizer.load import load_tokenizer
from jinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer", "load_tokenizer"]
