"""Domain names: which ones could exist. The list of suffixes is the one that tldextract's package carries."""

from __future__ import annotations

from functools import lru_cache

import tldextract

COMMON = frozenset(("com", "org", "net", "edu", "gov", "mil", "info"))
"""Suffixes that nothing else in prompts looks like."""

# Without these arguments it would fetch the list, and keep it in a folder of the user's.
_extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@lru_cache(maxsize=4096)
def could_exist(domain: str) -> bool:
    """Whether a domain ends in a public suffix, with a name before it."""
    return _extract(domain).top_domain_under_public_suffix != ""
