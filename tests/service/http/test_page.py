"""The files of the page, the lists that it shows, and what other pages may not do. tests/e2e has it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bottega.http.answers import AdaptersAnswer, FleetAnswer
from tests.fakes.scripted_worker import ScriptedWorker
from tests.service.http.test_server import _caller, _https
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door, running_http
from tests.support.tenants import add_tenant
from tests.support.waiting import eventually

_FOLDER = Path(__file__).resolve().parents[3] / "services/bottega/http/page"


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_page_is_public_and_loads_only_its_own_files(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    add_tenant(file, "ours")
    server = {"listen": "0.0.0.0:0", "https": _https(tmp_path)}
    async with (
        running_gateway(tenants=str(file)) as house,
        running_http(house.address, server=server) as door,
        _caller(door) as client,
    ):
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", page.text)
        for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/", headers={"if-none-match": page.headers["etag"]})).status_code == 304
        for outside in ("/page/../config.py", "/page/%2e%2e/config.py", "/page//etc/passwd", "/page/"):
            assert (await client.get(outside)).status_code in (401, 404), outside
        for path in ("/v1/loras", "/v1/controlnets", "/v1/fleet"):
            assert (await client.get(path)).status_code == 401, path


async def test_pages_elsewhere_cannot_embed_answers_but_may_link_here(door: Door, house: Running) -> None:
    for site in ("cross-site", "same-site"):
        for mode, status in (("no-cors", 403), ("cors", 403), ("navigate", 200)):
            headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
            assert (await door.http.get("/", headers=headers)).status_code == status, (site, mode)
    async with running_http(house.address, origins=["https://app.example"]) as other:
        for page, status in (
            ("https://app.example/", 200),
            ("https://evil.example/", 403),
            ("https://app.example.evil/", 403),
        ):
            headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "referer": page}
            assert (await other.http.get("/v1/jobs", headers=headers)).status_code == status, page
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert (await door.http.get("/v1/images/files/expired", headers=link)).status_code == 404
    assert (await door.http.get("/v1/jobs", headers={"sec-fetch-site": "same-origin"})).status_code == 200


async def test_lists_of_adapters_and_the_fleet_with_the_service_itself(house: Running, worker: ScriptedWorker) -> None:
    async with running_http(house.address, fleet=house.fleet_address, name="door") as door:
        for path in ("/v1/loras", "/v1/controlnets"):
            AdaptersAnswer.model_validate_json((await door.http.get(path)).content)

        async def members() -> set[tuple[str, str]]:
            fleet = FleetAnswer.model_validate_json((await door.http.get("/v1/fleet")).content)
            return {(member.kind, member.name) for member in fleet.data}

        await eventually(lambda: _has(members, ("http", "door")))


async def _has(members: object, wanted: tuple[str, str]) -> bool:
    return wanted in await members()  # type: ignore[operator]


async def test_a_tenant_does_not_see_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key = add_tenant(file, "ours")
    async with (
        running_gateway(tenants=str(file)) as house,
        running_http(house.address, fleet=house.fleet_address, api_key=key) as door,
    ):
        assert (await door.http.get("/v1/fleet")).status_code == 403
        assert (await door.http.get("/v1/fleet", headers={"authorization": ""})).status_code == 401


async def test_modules_of_the_page_are_short_and_have_no_markup_that_the_policy_forbids() -> None:
    for path in _FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 400, path.name
        assert not re.search(r"\bstyle=|\bon(click|load|input)=|innerHTML|unsafeHTML|eval\(", text), path.name
