"""The set-up of a checkout looks for packages where pip is told to look."""

from __future__ import annotations

from deploy.set_up import uv_environment

_LISTED = """global.extra-index-url='file:///a/simple https://b/simple'
global.find-links='/old'
global.user='true'
:env:.find-links='/wheels /more'
:env:.cert='/etc/ca.crt'
"""


def test_uv_installs_from_where_pip_would() -> None:
    assert uv_environment(_LISTED) == {
        "UV_INDEX": "file:///a/simple https://b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/ca.crt",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert uv_environment("") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
