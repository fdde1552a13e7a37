"""Addresses on the public internet."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import regex

from stages.gen_data.privacy.context import MATCH_S, after, before, words
from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.form import LIKELY, Form

_V4 = regex.compile(
    r"(?<![0-9A-Za-z_.])(?:\d{1,3}\.){3}\d{1,3}(?![0-9A-Za-z_]|\.\d|\+\w|-[a-z])", regex.IGNORECASE
)
_V6 = regex.compile(
    r"(?<![0-9A-Za-z_:.])[0-9a-f]{0,4}:[0-9a-f:]{1,38}(?:(?:\d{1,3}\.){3}\d{1,3})?(?![0-9A-Za-z_:]|\.\d)",
    regex.IGNORECASE,
)
_IN_USE_V6 = ipaddress.ip_network("2000::/3")
_DOCUMENTATION_V6 = ipaddress.ip_network("3fff::/20")
_RESOLVERS = frozenset(("1.1.1.1", "8.8.8.8", "8.8.4.4", "9.9.9.9"))

_IP_WORDS = words(
    "ips?", "ipv4", "address(?:es)?", "ping", "ssh", "server", "servers", "host", "hosts", "dns",
    "nameserver", "gateway", "router", "subnet", "cidr", "firewall", "traceroute", "whois", "nslookup",
    "curl", "https?", "scp", "sftp", "rsync", "rdp", "vpn", "proxy", "client", "remote",
    "connect(?:s|ed|ing|ion)?", "地址", "服务器", "サーバー",
)  # fmt: skip
_VERSION_WORDS = (
    r"v|ver|versions?|release[sd]?|build|firmware|revision|rev|sdk|drivers?|patch|updated?|upgraded?|"
    r"sections?|chapter|clause|"
    r"article|paragraph|figure|fig|table|appendix|exercise|step|part|item|oid|assemblyversion|fileversion|"
    r"installed"
)
_NUMBERED = regex.compile(
    rf"(?:\b(?:{_VERSION_WORDS})\.?[\s:=\"'(\[#v]*|\u00a7\s*|[=~!<>]=\s*|[a-z][\w.]*/|[a-z0-9]@\^?)\Z",
    regex.IGNORECASE,
)
_VERSIONS = regex.compile(rf"\b(?:{_VERSION_WORDS})\b", regex.IGNORECASE)


_BEGINS_LINE, _HEADING_BEHIND = regex.compile(r"(?:\A|\n)\s*\Z"), regex.compile(r"\.?\s+\p{L}")

NEAR = 30
"""How near a word must be that makes four numbers a version, in characters."""


class PublicIp(Form):
    """An address of someone's machine; private, loopback and documentation addresses are nobody's."""

    entity = "IP_ADDRESS"
    hint = regex.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d|[0-9a-f]:[0-9a-f:]*:|::[0-9a-f]", regex.IGNORECASE)

    def find(self, text: str) -> Iterator[Finding]:
        for match in _V4.finditer(text, timeout=MATCH_S):
            if is_public(match[0]) and not _is_number(text, match.start(), match.end()):
                yield Finding(match.start(), match.end(), self.entity, LIKELY)
        for match in _V6.finditer(text, timeout=MATCH_S):
            shown = (
                match[0].rstrip(":") if match[0].endswith(":") and not match[0].endswith("::") else match[0]
            )
            if is_public(shown):
                yield Finding(match.start(), match.start() + len(shown), self.entity, LIKELY)


def is_public(address: str) -> bool:
    """Whether an address, of either version and with or without a prefix length, is one on the public
    internet."""
    try:
        parsed = ipaddress.ip_interface(address.partition("%")[0]).ip
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        if (inner := parsed.ipv4_mapped) is not None:
            return is_public(str(inner))
        # `a[2000::3]` of Python is a slice
        groups = sum(group != "" for group in address.split(":"))
        return parsed.is_global and parsed in _IN_USE_V6 and parsed not in _DOCUMENTATION_V6 and groups >= 3
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _is_number(text: str, start: int, end: int) -> bool:
    """Whether four numbers with dots between are a version or the number of a section."""
    ahead = before(text, start)
    said = _IP_WORDS.search(ahead, timeout=MATCH_S) or _IP_WORDS.search(after(text, end), timeout=MATCH_S)
    if _NUMBERED.search(ahead, timeout=MATCH_S) and not ahead.endswith("//"):
        large = max(map(int, text[start:end].split("."))) >= 100
        return not (ahead.endswith("@") and (said or large))  # ssh root@1.2.3.4, but not package@1.2.3.4
    if said:
        return False
    if text[start:end] in _RESOLVERS:
        return bool(_BEGINS_LINE.search(ahead) and _HEADING_BEHIND.match(text, end))
    if _VERSIONS.search(before(text, start, NEAR), timeout=MATCH_S):
        return True
    return max(map(int, text[start:end].split("."))) < 10
