"""Block sizes found by measuring, in a `tuned.json` beside each kernel; without an entry the estimate decides."""

import functools
import json
from pathlib import Path

from pallas_kernels.platform import device_kind


def tuned(module: str, key: str) -> dict[str, int]:
    """The entry of `key` for the device programs are traced for, {} if there is none.

    Args:
      module: `__file__` of the kernel. key: dtypes, heads, head_dim, page size as the kernel spells them.
    """
    return _table(Path(module).with_name("tuned.json")).get(device_kind(), {}).get(key, {})


@functools.cache
def _table(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(path.read_text()) if path.exists() else {}
