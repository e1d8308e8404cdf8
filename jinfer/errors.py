"""Errors a user of jinfer can meet. Each carries one clear line; the CLI prints it and exits non-zero."""


class JinferError(Exception):
    """Base of every error jinfer raises on purpose."""


class ConfigError(JinferError):
    """A configuration value is unknown, malformed or impossible. The message names the field."""


class LayoutError(ConfigError):
    """A mesh does not divide the model. The message carries both numbers and what would fit."""


class CheckpointError(JinferError):
    """A checkpoint is broken, incomplete, or holds tensors nothing consumes. The message names them."""


class TokenizerError(JinferError):
    """A tokenizer or chat template cannot be loaded or applied."""


class RequestError(JinferError):
    """One request is invalid; no other request is disturbed.

    Attributes:
      field: the name of the offending parameter, as the user spelled it.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class CapacityError(RequestError):
    """A request can never fit, whatever else finishes. The message carries both numbers."""


class OverloadError(JinferError):
    """The request is fine, but the engine takes no more now: the queue is full, or it drains. Try again later."""


class CacheError(JinferError):
    """The download or compilation cache cannot be written (no space, no permission)."""


class RetraceError(JinferError):
    """A program was compiled after warm-up while the engine was told that this is an error."""
