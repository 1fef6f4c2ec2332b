"""Addresses of servers, as users name them."""

import ipaddress
from urllib.parse import SplitResult, urlsplit


def split_address(url: str) -> SplitResult | None:
    """The parts of an http or https address with a host; None for any other text."""
    try:
        parts = urlsplit(url)
        # Reading `port` raises ValueError for one above 65,535. Nobody can connect to port 0.
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_address else None


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own."""
    try:
        # An IPv6 address may name the interface behind a %.
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
