"""Which addresses a callback may connect to: public ones. Pure.

A table of our own: what `ipaddress` calls global depends on the version of Python, and it looks
into only some of the IPv6 addresses that contain an IPv4 one.
"""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

METADATA = "a cloud's metadata service"
# By RFC 6890 and IANA's registries of special-purpose addresses.
_REFUSED_4 = {
    IPv4Network(text): why
    for text, why in {
        "0.0.0.0/8": "an unspecified address",
        "10.0.0.0/8": "a private address",
        "100.100.100.200/32": METADATA,
        "100.64.0.0/10": "an address of a carrier's own network",
        "127.0.0.0/8": "a loopback address",
        "168.63.129.16/32": METADATA,
        "169.254.169.254/32": METADATA,
        "169.254.170.2/32": METADATA,
        "169.254.0.0/16": "a link-local address",
        "172.16.0.0/12": "a private address",
        "192.0.0.192/32": METADATA,
        "192.0.0.0/24": "an address for protocols",
        "192.0.2.0/24": "an address for documentation",
        "192.31.196.0/24": "an address for protocols",
        "192.52.193.0/24": "an address for protocols",
        "192.88.99.0/24": "an address of a relay",
        "192.168.0.0/16": "a private address",
        "192.175.48.0/24": "an address for protocols",
        "198.18.0.0/15": "an address for benchmarks",
        "198.51.100.0/24": "an address for documentation",
        "203.0.113.0/24": "an address for documentation",
        "224.0.0.0/4": "a multicast address",
        "255.255.255.255/32": "the broadcast address",
        "240.0.0.0/4": "a reserved address",
    }.items()
}
_REFUSED_6 = {
    IPv6Network(text): why
    for text, why in {
        "::/128": "an unspecified address",
        "::1/128": "a loopback address",
        "64:ff9b:1::/48": "an address of a local translator",
        "2001::/23": "an address for protocols",
        "2001:db8::/32": "an address for documentation",
        "2620:4f:8000::/48": "an address for protocols",
        "3fff::/20": "an address for documentation",
        "fd00:ec2::254/128": METADATA,
        "fd20:ce::254/128": METADATA,
        "fc00::/7": "a private address",
        "fe80::/10": "a link-local address",
        "fec0::/10": "a private address",
        "ff00::/8": "a multicast address",
    }.items()
}
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_TRANSLATED = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
# Never allowed by a name, even one that is listed: only if the address itself is.
_NEVER_BY_NAME = {METADATA, "a link-local address", "a multicast address", "the broadcast address"}


def refusal(address: str | Address) -> str | None:
    """Why a callback may not connect to this address; None if it may."""
    try:
        ip = ip_address(address)
    except ValueError:
        return "not an address"
    if isinstance(ip, IPv4Address):
        return _listed(ip, _REFUSED_4)
    if ip.scope_id is not None:
        return "an address with a zone"
    for inner in _inside(ip):
        if (why := refusal(inner)) is not None:
            return f"{why}, {inner}, inside an IPv6 address"
    if ip.ipv4_mapped is not None or ip in _TRANSLATED or ip.teredo is not None:
        return None  # as good as what is inside
    if (why := _listed(ip, _REFUSED_6)) is not None:
        return why
    return None if ip in _GLOBAL_UNICAST else "a reserved address"


def allowed_by_name(address: str | Address) -> bool:
    """Whether a name for hosts of one's own network may stand for this address, public or not."""
    why = refusal(unwrapped(address))
    return why is None or why.partition(",")[0] not in _NEVER_BY_NAME


def unwrapped(address: str | Address) -> Address:
    """The address itself; of an IPv4 one that is written as IPv6, the IPv4 one."""
    ip = ip_address(address)
    return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip


def network(text: str) -> Network | None:
    """The network that a text names, as "10.0.0.0/8" or "127.0.0.1"; None if it names none."""
    try:
        return ip_network(text)
    except ValueError:
        return None


def _listed(ip: Address, table: dict[IPv4Network, str] | dict[IPv6Network, str]) -> str | None:
    # The most special first: a metadata service is in a larger network.
    found = [(each.prefixlen, why) for each, why in table.items() if ip in each]
    return max(found)[1] if found else None


def _inside(ip: IPv6Address) -> list[IPv4Address]:
    """The IPv4 addresses that an IPv6 address contains: packets may end up there."""
    low = IPv4Address(int(ip) & 0xFFFF_FFFF)
    found = [each for each in (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())) if each]
    if ip in _TRANSLATED:
        found.append(low)
    # `::` and `::1` are addresses of their own.
    if ip in _COMPATIBLE and int(ip) > 1:
        found.append(low)
    if (int(ip) >> 32) & 0xFFFF_FFFF in _ISATAP:
        found.append(low)
    return found
