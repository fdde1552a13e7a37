"""Domain names: which ones could exist. The list of suffixes is the one that tldextract's package carries."""

from __future__ import annotations

from functools import lru_cache

import tldextract

COMMON = frozenset(("com", "org", "net", "edu", "gov", "mil", "info"))
"""Suffixes that nothing else in prompts looks like."""

_INTERNAL = frozenset(("corp", "example", "home", "internal", "intranet", "invalid", "lan", "local", "test"))

# Without these arguments it would fetch the list, and keep it in a folder of the user's.
_extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)


@lru_cache(maxsize=4096)
def could_exist(domain: str) -> bool:
    """Whether a domain ends in a public suffix, with a name before it."""
    return _extract(domain).top_domain_under_public_suffix != ""


def could_have_mail(domain: str) -> bool:
    """Whether mail may have such an address: one that could exist, or of a network of its own."""
    name, _, suffix = domain.rpartition(".")
    return could_exist(domain) or (suffix.lower() in _INTERNAL and bool(name))
