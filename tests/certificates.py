"""Certificates for servers and clients on this machine."""

from __future__ import annotations

from pathlib import Path

import trustme


def certificate(folder: Path) -> tuple[Path, Path, Path]:
    """An authority of its own, and a certificate that it signed: ca.crt, server.crt, server.key."""
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    ca, cert, key = folder / "ca.crt", folder / "server.crt", folder / "server.key"
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    return ca, cert, key
