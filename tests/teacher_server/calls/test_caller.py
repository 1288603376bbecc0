import pytest

from teacher_server.calls.caller import peer_address


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:5000", "10.0.0.7"),
        ("ipv4:10.0.0.7:5001", "10.0.0.7"),
        ("ipv6:%5B::1%5D:5000", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:5000", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:ffff::1%5D:80", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:80", "10.0.0.7"),
        ("unix:/run/opd.sock", "unix"),
        ("unix:", "unix"),
        ("", ""),
        ("ipv4:nonsense", ""),
    ],
)
def test_a_peer_is_its_host_whatever_its_port(peer: str, address: str) -> None:
    assert peer_address(peer) == address
