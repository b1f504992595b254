"""Objects in S3 when S3 fails, refuses or is slow; the environment that it is configured by; and secrets."""

from __future__ import annotations

import hashlib
import logging
import re
import urllib.error
import urllib.request
from typing import Any

import pytest

from bottega.errors import ConfigError, StorageUnavailable
from bottega.storage import s3 as s3_module
from bottega.storage.objects import OPERATOR_CAUSES, s3_location
from bottega.storage.s3 import S3Objects
from tests.support import s3
from tests.support.waiting import wait_until

NAMES = re.compile(r"[0-9a-f]{4}")
DATA = b"a picture"


def _store(bucket: str, **changed: Any) -> S3Objects:
    return S3Objects(s3_location(f"s3://{bucket}/here"), names=NAMES, **changed)


def _read(store: S3Objects, name: str) -> bytes | None:
    return store.read(name, digest=hashlib.sha256(DATA).digest(), size_bytes=len(DATA))


def _refused(bucket: str) -> StorageUnavailable:
    with pytest.raises(StorageUnavailable) as raised:
        _store(bucket).probe()
    with pytest.raises(StorageUnavailable):
        _store(bucket).write("ab01", DATA)
    with pytest.raises(StorageUnavailable):
        list(_store(bucket).objects())
    with pytest.raises(StorageUnavailable):
        _read(_store(bucket), "ab01")
    return raised.value


def test_s3_that_fails_a_tenth_of_all_calls_loses_nothing(s3_server: s3.S3Server, s3_proxy: s3.FailingProxy) -> None:
    bucket = s3_server.bucket()
    store = _store(bucket)
    s3_proxy.failing = 0.1
    names = [f"ab{number:02x}" for number in range(40)]
    for name in names:
        store.write(name, DATA)
    assert sorted(item.name for item in store.objects()) == names
    assert [_read(store, name) for name in names] == [DATA] * 40
    assert s3_proxy.failed > 5
    assert s3_proxy.requests < 200, "tries are bounded"
    store.remove(names)
    s3_proxy.failing = 0.0
    assert list(store.objects()) == []


def test_s3_that_fails_all_calls_is_said_within_a_bound_and_heals(
    s3_server: s3.S3Server, s3_proxy: s3.FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(s3_server.bucket())
    s3_proxy.failing = 1.0
    with pytest.raises(StorageUnavailable, match="S3"):
        store.write("ab01", DATA)
    assert s3_proxy.requests <= 5, "one try and four more"
    s3_proxy.failing = 0.0
    store.write("ab01", DATA)
    assert _read(store, "ab01") == DATA


def test_slow_s3_is_waited_for_within_a_deadline(
    s3_server: s3.S3Server, s3_proxy: s3.FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.bucket()
    s3_proxy.delay_s = 0.5
    store = _store(bucket)
    store.write("ab01", DATA)
    assert _read(store, "ab01") == DATA
    began = s3_proxy.requests
    with pytest.raises(StorageUnavailable):
        _read(_store(bucket, request_s=0.2), "ab01")
    assert s3_proxy.requests - began <= 2
    monkeypatch.setattr(s3_module, "_REQUEST_S", 0.2)
    monkeypatch.setattr(s3_module, "_MAX_RETRIES", 1)
    began = s3_proxy.requests
    with pytest.raises(StorageUnavailable):
        _store(bucket).write("ab02", DATA)
    assert s3_proxy.requests - began <= 2


def test_s3_that_was_restarted_has_what_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3.started("nanio")
    try:
        s3.set_environment(monkeypatch, server.url)
        store = _store(server.bucket())
        store.write("ab01", DATA)
        server.kill()
        with pytest.raises(StorageUnavailable, match=f"does not answer at {server.url}") as raised:
            store.write("ab02", DATA)
        assert raised.value.metadata["cause"] not in OPERATOR_CAUSES, "it may come back"
        server.start()
        assert _read(store, "ab01") == DATA
        store.write("ab02", DATA)
    finally:
        server.end()


def test_a_bucket_or_keys_that_s3_does_not_know_are_said(
    s3_server: s3.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = _refused("no-such-bucket")
    assert "bucket no-such-bucket does not exist" in error.message
    assert error.metadata["cause"] in OPERATOR_CAUSES
    bucket = s3_server.bucket()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert "AWS_SECRET_ACCESS_KEY" in _refused(bucket).message
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    assert "AWS_ACCESS_KEY_ID" in _refused(bucket).message


def test_a_refusal_says_what_to_do_and_no_secret(
    s3_server: s3.S3Server, s3_proxy: s3.FailingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bucket = s3_server.bucket()
    for code, text in (
        ("AccessDenied", "s3:PutObject"),
        ("RequestTimeTooSkewed", "clocks"),
        ("ExpiredToken", "AWS_SESSION_TOKEN"),
        ("SomethingNew", "S3 has failed (SomethingNew)"),
    ):
        s3_proxy.refusal = code
        error = _refused(bucket)
        assert text in error.message
        assert (error.metadata["cause"] in OPERATOR_CAUSES) == (code != "SomethingNew")
        assert s3.SECRET not in f"{error} {error.metadata} {caplog.text}"
    assert s3.SECRET not in repr(vars(_store("some-bucket")))


def test_a_missing_or_wrong_environment_is_said(s3_server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3_server.bucket()
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "rot13")
    with pytest.raises(ConfigError, match="AWS_"):
        _store(bucket)
    monkeypatch.delenv("AWS_SERVER_SIDE_ENCRYPTION")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    assert "AWS_ACCESS_KEY_ID" in _refused(bucket).message


def test_objects_are_encrypted_as_the_environment_says(
    s3_server: s3.S3Server, s3_proxy: s3.FailingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.bucket()
    encryption, key = "x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id"
    for environment, headers in (
        ({}, {}),
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, {encryption: "AES256"}),
        (
            {"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms", "AWS_SSE_KMS_KEY_ID": "alias/pictures"},
            {encryption: "aws:kms", key: "alias/pictures"},
        ),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3_proxy.seen.clear()
        _store(bucket).write("ab01", DATA)
        _store(bucket).write("ab02", bytes(9 << 20))
        begun = [seen for seen in s3_proxy.seen if "content-length" in seen]
        asked = [{name: value for name, value in seen.items() if name.startswith(encryption)} for seen in begun[:2]]
        assert asked == [headers, headers], "an object in one piece, and the beginning of one in parts"


def test_a_signed_url_reads_one_object_until_it_expires(s3_server: s3.S3Server) -> None:
    store = _store(s3_server.bucket(), public_endpoint=s3_server.url)
    store.write("ab01", DATA)
    url = store.url("ab01", expires_s=60)
    assert s3.SECRET not in url
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.read() == DATA

    def is_refused(wrong: str) -> bool:
        try:
            urllib.request.urlopen(wrong, timeout=30).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 403
        return False

    assert is_refused(url.replace("ab01", "ab02"))
    short = store.url("ab01", expires_s=1)
    wait_until(lambda: is_refused(short), "the end of a URL")
    public = _store("some-bucket", public_endpoint="https://pictures.example.com").url("ab01", expires_s=60)
    assert public.startswith("https://pictures.example.com/some-bucket/here/ab/ab01?")


@pytest.mark.parametrize(
    "wrong",
    [
        *("s3://", "s3://B", "s3://bucket/", "s3://bucket/a//b", "s3://bucket/../a", "http://bucket", "bucket"),
        *("s3://user:secret@bucket", "s3://bucket/a?b", "s3://bucket/a b", " s3://bucket"),
    ],
)
def test_a_location_of_another_form_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="must be s3://bucket"):
        s3_location(wrong)
