"""Which addresses callbacks may connect to, however they are written."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network

import pytest
from hypothesis import given, strategies as st

from tickwheel.callbacks import refusal
from tickwheel.callbacks.addresses import allowed_by_name

PUBLIC_4 = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "100.63.255.255", "100.128.0.0", "172.32.0.1"]
PUBLIC_6 = ["2606:4700:4700::1111", "2a00:1450:4001:800::200e", "2001:4860:4860::8888"]
NOT_PUBLIC_4 = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "100.127.255.255"),
    *("127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.169.254", "169.254.170.2"),
    *("172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1"),
    *("192.168.1.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.254", "255.255.255.255"),
]
NOT_PUBLIC_6 = [
    *("::", "::1", "::2", "100::1", "64:ff9b:1::8.8.8.8", "2001::1", "2001:2::1", "2001:db8::1"),
    *("3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fec0::1"),
    *(
        "ff02::1",
        "4000::1",
        "e000::1",
        "fe80::1%eth0",
        "2606:4700:4700::1111%2",
        "::ffff:0:8.8.8.8",
    ),
]


def embeddings(address: str) -> list[str]:
    """The IPv6 addresses whose packets may end up at an IPv4 address."""
    low = int(IPv4Address(address))
    teredo = (0x2001 << 112) | (low << 64) | (0xFFFFFFFF ^ 0x08080808)
    teredo_client = (0x2001 << 112) | (0x08080808 << 64) | (0xFFFFFFFF ^ low)
    return [
        f"::ffff:{address}",
        f"64:ff9b::{address}",
        f"::{address}",
        str(IPv6Address((0x2002 << 112) | (low << 80))),
        f"2606:4700::5efe:{address}",
        f"2606:4700::200:5efe:{address}",
        str(IPv6Address(teredo)),
        str(IPv6Address(teredo_client)),
    ]


@pytest.mark.parametrize("address", PUBLIC_4 + PUBLIC_6)
def test_public_addresses_are_allowed(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize("address", NOT_PUBLIC_4 + NOT_PUBLIC_6)
def test_others_are_refused_with_a_reason(address: str) -> None:
    assert refusal(address)


@pytest.mark.parametrize("address", NOT_PUBLIC_4)
def test_they_are_refused_inside_an_ipv6_address_too(address: str) -> None:
    for outer in embeddings(address):
        assert refusal(outer), outer


@pytest.mark.parametrize(
    "address", ["::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1", "2606:4700::5efe:8.8.8.8"]
)
def test_a_public_one_inside_is_allowed(address: str) -> None:
    assert refusal(address) is None


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "127.1", "0x7f.0.0.1", "0177.0.0.1", "2130706433", "1", "[::1]", "::g"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    assert refusal(text) == "not an address"


@pytest.mark.parametrize("address", ["169.254.169.254", "100.100.100.200", "fd00:ec2::254"])
def test_metadata_services_are_called_so_and_no_name_makes_them_allowed(address: str) -> None:
    assert refusal(address) == "a cloud's metadata service"
    assert not allowed_by_name(address)
    assert allowed_by_name("10.0.0.1") and allowed_by_name("::1") and allowed_by_name("8.8.8.8")


@given(st.ip_addresses(v=4))
def test_what_python_calls_not_global_we_refuse_and_inside_ipv6_too(address: IPv4Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert refusal(address)
    if refusal(address):
        assert all(map(refusal, embeddings(str(address))))


@given(st.ip_addresses(v=6))
def test_only_global_unicast_is_public(address: IPv6Address) -> None:
    if refusal(address) is None:
        inside = address.ipv4_mapped or address in IPv6Network("64:ff9b::/96")
        assert inside or 0x2 <= int(address) >> 124 <= 0x3
    if not address.is_global and not address.ipv4_mapped and not address.sixtofour:
        assert refusal(address) or address in IPv6Network("64:ff9b::/96")
