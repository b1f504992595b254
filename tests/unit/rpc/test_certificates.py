"""Certificates of an authority of one's own: whom they name, until when, and what is refused."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from bottega.rpc.security.caller import Identity, Role, identity_from, identity_in
from bottega.rpc.security.certificates import CertificatePair, check_pair, facts_of, new_authority, new_certificate
from bottega.rpc.security.private_files import read_private, write_file
from bottega.rpc.security.tls import TlsConfig, TlsFiles
from tests.support.certificates import Authority

WORKER = Identity(role=Role.WORKER, name="gpu-1.rack-2")
DAY_S = 86_400.0


def test_a_certificate_names_an_identity_until_its_time_is_over() -> None:
    authority = new_authority(days=10)
    pair = new_certificate(authority, WORKER, days=5)
    facts = facts_of(pair.certificate, source="c")
    assert facts.identity == WORKER
    assert facts.expires_wall == pytest.approx(time.time() + 5 * DAY_S, abs=60)
    assert facts.begins_wall < time.time() - 60, "clocks differ"
    check_pair(pair, authority.certificate, source="c")
    late = new_certificate(authority, WORKER, days=50)
    assert facts_of(late.certificate, source="c").expires_wall == pytest.approx(time.time() + 10 * DAY_S, abs=60)


def test_keys_and_authorities_that_do_not_belong_together_are_refused() -> None:
    authority, foreign = new_authority(days=10), new_authority(days=10)
    one, other = new_certificate(authority, WORKER, days=5), new_certificate(authority, WORKER, days=5)
    with pytest.raises(ConfigError, match="does not belong to the certificate"):
        check_pair(CertificatePair(certificate=one.certificate, key=other.key), authority.certificate, source="c")
    with pytest.raises(ConfigError, match="not signed by the configured authority"):
        check_pair(one, foreign.certificate, source="c")
    with pytest.raises(ConfigError, match="not a PEM certificate"):
        check_pair(CertificatePair(certificate=b"x", key=one.key), authority.certificate, source="c")
    with pytest.raises(ConfigError, match="not a PEM key"):
        check_pair(CertificatePair(certificate=one.certificate, key=b"x"), authority.certificate, source="c")


@pytest.mark.parametrize("text", ["worker/gpu-1", "tenant/shop", "operator/anna.b"])
def test_names_that_people_write_are_identities(text: str) -> None:
    identity = identity_from(text)
    assert identity is not None
    assert str(identity) == text
    assert identity_in(["x.example", identity.uri]) == identity


@pytest.mark.parametrize(
    "text",
    ["", "worker", "worker/", "local/me", "king/me", "worker/A", "worker/-a", "worker/a/b", "worker/" + "a" * 64],
)
def test_what_is_no_name_is_none(text: str) -> None:
    assert identity_from(text) is None


def test_a_certificate_with_two_identities_names_nobody() -> None:
    assert identity_in(["bottega://worker/a", "bottega://gateway/b"]) is None
    assert identity_in(["bottega://worker/a.b/../c"]) is None
    assert identity_in([]) is None


def test_renewed_files_count_and_those_that_cannot_be_used_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.rpc.security.tls._LOOK_S", 0.0)
    authority = Authority(tmp_path)
    config = authority.issue("worker/w1", days=3)
    files = TlsFiles(config)
    before = files.material
    authority.issue("worker/w1", days=4)
    renewed = files.material
    assert renewed.expires_wall - before.expires_wall == pytest.approx(DAY_S, abs=60)
    Path(config.certificate).write_text("half of a")
    assert files.material is renewed
    authority.issue("worker/w1", days=2)
    assert files.material.expires_wall < renewed.expires_wall


def test_files_are_all_or_none_and_must_name_somebody(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    config = authority.issue("worker/w1")
    with pytest.raises(ValueError, match="key must be set too"):
        replace(config, key="")
    assert not TlsConfig().given
    with pytest.raises(ConfigError, match="is not there"):
        TlsFiles(replace(config, certificate=str(tmp_path / "nowhere.pem")))
    of_authority = replace(config, certificate=config.authority, key=str(authority.folder.authority_key_path))
    with pytest.raises(ConfigError, match="has no identity"):
        TlsFiles(of_authority)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    config = Authority(tmp_path).issue("worker/w1")
    key = Path(config.key)
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        TlsFiles(config)
    assert Path(config.certificate).stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="systemd's credentials are root's")
def test_a_credential_of_systemd_that_an_access_list_opens_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "credential"
    write_file(path, b"secret")
    path.chmod(0o440)
    with pytest.raises(ConfigError):
        read_private(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_private(path) == b"secret"
    path.chmod(0o460)
    with pytest.raises(ConfigError):
        read_private(path)
