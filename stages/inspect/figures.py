"""Numbers, sizes and times as people read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from stages.inspect.text import printable

HASH_SHOWN = 8
_SHA256 = re.compile("[0-9a-f]{64}")
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """`543.4 MB`; thousands, not 1024s."""
    unit = 0
    while count >= 999.95 and unit + 1 < len(_UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:,.0f} {_UNITS[0]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def digest(sha256: str) -> str:
    return sha256[:HASH_SHOWN]


def when(created: str) -> str:
    """An ISO time as `2026-11-29 17:20 UTC`; what is none is returned as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return printable(created)


def count(content: Any) -> str:
    """What a stage counted, whole numbers with separators."""
    return f"{content:,}" if isinstance(content, int) and not isinstance(content, bool) else setting(content)


def setting(content: Any) -> str:
    """A setting as its flag takes it: text without quotes, digests cut short, anything else as JSON."""
    if content is None:
        return "-"
    if isinstance(content, bool):
        return "yes" if content else "no"
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return printable(_SHA256.sub(lambda match: digest(match[0]), text))


def flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as one level: `holdout.agreement`. Empty ones are left out."""
    for key, item in content.items():
        name = f"{above}{key}"
        if isinstance(item, Mapping):
            yield from flat(item, f"{name}.")
        else:
            yield printable(name), item
