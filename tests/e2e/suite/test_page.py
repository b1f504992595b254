"""The page in a real browser: drawing, editing, history, errors, tenants, and a gateway that goes and comes back."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image
import pytest
import pytest_asyncio

from bottega.client import AsyncClient, ControlNet, JobState
from bottega.client.suite.plan import free_ports
from bottega.rpc.security.api_keys import new_key
from tests.e2e.conftest import Suite
from tests.fakes.scripted_controlnet import ScriptedControlNetServer, hosted
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.browser import Tab, chromium, opened, running_browser
from tests.support.running_http import running_http
from tests.support.services import FREE_PORTS, Service, Services, gateway_config
from tests.support.tenants import add_tenant
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium here (Debian: apt install chromium)"),
    pytest.mark.asyncio(loop_scope="module"),
]

_PROMPT = "a big red star on the left on a blue background"
_PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as browser:
        yield browser


@pytest.fixture
def url(http: Service) -> str:
    return f"http://{http.address}/"


async def test_the_keyboard_alone_draws_and_draws_again(browser: Browser, url: str) -> None:
    async with opened(browser, url) as tab:
        page, keyboard = tab.page, tab.page.keyboard
        await _tab_to(tab, "Skip to the content")
        await keyboard.press("Enter")
        await keyboard.press("Tab")
        await keyboard.type(_PROMPT)
        await _tab_to(tab, "Seed")
        await keyboard.type("7")
        await _tab_to(tab, "Steps, guidance, size and more")
        await keyboard.press("Enter")
        await _tab_to(tab, "Steps")
        await keyboard.type("6")
        await _tab_to(tab, "Draw")
        await keyboard.press("Enter")
        await page.wait_for_selector(".stage figure img")
        assert await page.get_by_role("status").inner_text() == "The picture is ready."
        assert await _focused(tab) == "Draw", "the button keeps the focus"
        await _tab_to(tab, "History", back=True)
        await keyboard.press("Enter")
        await page.wait_for_selector(".card img")
        await _tab_to(tab, "Refresh")
        await keyboard.press("Tab")
        await keyboard.press("Enter")
        await page.wait_for_selector(".timeline .bar")
        await _tab_to(tab, "Again with these")
        await keyboard.press("Enter")
        await page.get_by_role("button", name="Draw").wait_for()
        assert await page.get_by_label("Seed", exact=True).input_value() == "7"
        assert await page.locator("#f-bottega-num-inference-steps").input_value() == "6"


async def _tab_to(tab: Tab, name: str, *, back: bool = False) -> None:
    for _ in range(40):
        await tab.page.keyboard.press("Shift+Tab" if back else "Tab")
        if await _focused(tab) == name:
            return
    raise AssertionError(f"the keyboard does not reach {name}")


async def _focused(tab: Tab) -> str:
    """The name of what has the focus: its label or its text."""
    script = "() => (document.activeElement.labels?.[0] ?? document.activeElement).innerText.trim()"
    return str(await tab.page.evaluate(script))


async def test_cancel_ends_a_job(browser: Browser, url: str, suite: Suite) -> None:
    async with opened(browser, url) as tab:
        await tab.page.get_by_label("Prompt", exact=True).fill(_PROMPT)
        await tab.page.get_by_text("Steps, guidance, size and more").click()
        await tab.page.get_by_label("Steps", exact=True).fill("200")
        await tab.page.get_by_role("button", name="Draw").click()
        await tab.page.get_by_role("button", name="Cancel").click()
        await tab.page.get_by_text("Cancelled.", exact=True).first.wait_for()
        await tab.page.get_by_role("button", name="Draw").wait_for()
    assert suite.client.list_jobs().jobs[0].state is JobState.CANCELLED


async def test_an_edit_redraws_what_was_painted_and_keeps_the_rest(
    browser: Browser, url: str, suite: Suite, tmp_path: Path
) -> None:
    drawn = suite.client.generate(_PROMPT, seed=7, num_inference_steps=6)
    file = tmp_path / "star.png"
    drawn.save(file)
    async with opened(browser, f"{url}#edit") as tab:
        page = tab.page
        await page.get_by_label("Picture to edit").set_input_files(file)
        canvas = page.locator(".canvas canvas")
        await canvas.scroll_into_view_if_needed()
        box = await canvas.bounding_box()
        assert box is not None
        x, y = box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"]
        await page.mouse.move(x, y)
        await page.mouse.down()
        await page.mouse.move(x, y + 0.4 * box["height"], steps=4)
        await page.mouse.up()
        for label, value in (("Left", 4), ("Top", 20), ("Width", 12), ("Height", 12)):
            await page.get_by_label(label, exact=True).fill(str(value))
        await page.get_by_role("button", name="Add rectangle").click()
        assert await canvas.get_attribute("aria-label") == "Mask: 2 shapes"
        await page.get_by_label("Prompt", exact=True).fill("a big green star on the left on a blue background")
        await page.get_by_label("Seed", exact=True).fill("7")
        await page.get_by_text("Steps, guidance, size and more").click()
        await page.get_by_label("Steps", exact=True).fill("6")
        await page.get_by_role("button", name="Edit", exact=True).click()
        await page.wait_for_selector(".stage figure img")
        async with page.expect_download() as saving:
            await page.locator(".stage").get_by_role("button", name="Save").click()
        after = _pixels((await (await saving.value).path()).read_bytes())
    before = _pixels(file.read_bytes())
    painted, kept = (9, 22, 16, 42), (36, 0, 64, 64)
    assert after.crop(kept).tobytes() == before.crop(kept).tobytes()
    assert after.crop(painted).tobytes() != before.crop(painted).tobytes()


def _pixels(data: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


async def test_errors_stand_beside_their_fields(browser: Browser, url: str, tmp_path: Path) -> None:
    wrong = tmp_path / "notes.png"
    wrong.write_text("no picture")
    async with opened(browser, f"{url}#edit", may_complain=True) as tab:
        page = tab.page
        for file, sentence in ((wrong, "cannot be read as a picture"), (Path(__file__), "is not a PNG, JPEG or WebP")):
            await page.get_by_label("Picture to edit").set_input_files(file)
            await page.get_by_text(sentence).first.wait_for()
        await page.get_by_role("link", name="Draw").click()
        await page.get_by_role("button", name="Draw").click()
        await page.get_by_text("Say what to draw.").wait_for()
        assert await _focused(tab) == "Prompt"
        await page.get_by_label("Prompt", exact=True).fill(_PROMPT)
        await page.get_by_label("Pictures", exact=True).fill("99")
        await page.get_by_role("button", name="Draw").click()
        await page.locator("#f-n-problem").wait_for()
        assert await page.get_by_label("Pictures", exact=True).get_attribute("aria-invalid") == "true"


async def test_a_phone_shows_every_view_without_scrolling_sideways(browser: Browser, url: str) -> None:
    async with opened(browser, url, color_scheme="dark", **_PHONE) as tab:
        page = tab.page
        await page.get_by_text("Steps, guidance, size and more").tap()
        for view in ("Draw", "Edit", "History", "Fleet"):
            await page.get_by_role("link", name=view).tap()
            await page.locator(f"nav a[aria-current=page]:text-is('{view}')").wait_for()
            widths = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            scrolled, shown = await page.evaluate(widths)
            assert scrolled <= shown, view
        await page.get_by_role("cell", name="worker").first.wait_for()


@dataclass(slots=True, kw_only=True)
class _Tenants:
    """A gateway of its own with two tenants, a scripted worker and a ControlNet, and a page in front of it."""

    url: str
    ours: str
    theirs: str
    worker: ScriptedWorker
    services: Services
    gateway: Service
    config: dict[str, object]

    def restart_gateway(self) -> None:
        self.gateway = self.services.start("gateway", self.config, name="gateway")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[_Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    file, (port, fleet_port) = folder / "tenants.json", free_ports(2)
    ours, theirs = add_tenant(file, "ours"), add_tenant(file, "theirs")
    config = gateway_config(
        tenants=str(file),
        server={**FREE_PORTS, "listen": f"127.0.0.1:{port}"},
        fleet={"listen": f"127.0.0.1:{fleet_port}"},
    )
    with Services(folder) as services:
        gateway = services.start("gateway", config, name="gateway")
        worker = ScriptedWorker("w1", gateway.fleet)
        picture = _encoded("PNG")
        worker.script.picture, worker.script.preview = (lambda _: picture), _encoded("JPEG")
        await worker.start(join_timeout_s=60.0)
        nets = await ScriptedControlNetServer("nets", gateway.fleet, [hosted("edges")]).start(join_timeout_s=60.0)
        async with running_http(gateway.address, fleet=gateway.fleet, gateway_wait_s=0.2) as door:
            yield _Tenants(
                url=f"{door.url}/",
                ours=ours,
                theirs=theirs,
                worker=worker,
                services=services,
                gateway=gateway,
                config=config,
            )
        await nets.die()
        await worker.die()


def _encoded(kind: str) -> bytes:
    image = io.BytesIO()
    PIL.Image.new("RGB", (64, 64), "teal").save(image, kind)
    return image.getvalue()


async def _sign_in(tab: Tab, key: str) -> None:
    await _enter_key(tab, key)
    await tab.page.locator("dialog").wait_for(state="hidden")  # until then it keeps the focus, and what is typed


async def _enter_key(tab: Tab, key: str) -> None:
    await tab.page.get_by_label("Key", exact=True).fill(key)
    await tab.page.get_by_role("button", name="Use this key").click()


async def test_two_tenants_see_their_own_jobs_and_a_wrong_key_is_said(browser: Browser, tenants: _Tenants) -> None:
    async with opened(browser, tenants.url, may_complain=True) as tab:
        page = tab.page
        await _enter_key(tab, new_key()[0])
        await page.get_by_text("is not valid").wait_for()
        await _sign_in(tab, tenants.ours)
        await page.get_by_role("button", name="API key set").wait_for()
        await page.get_by_label("Prompt", exact=True).fill("ours alone")
        await page.get_by_role("button", name="Draw").click()
        await page.wait_for_selector(".stage figure img")
        await page.get_by_role("link", name="History").click()
        await page.get_by_role("button", name="ours alone").wait_for()
        await page.get_by_role("button", name="API key set").click()
        await _sign_in(tab, tenants.theirs)
        await page.get_by_text("Nothing was drawn yet.").wait_for()
        await page.get_by_role("link", name="Fleet").click()
        await page.get_by_text("The fleet is for operators").wait_for()
        assert await page.evaluate("() => Object.keys(localStorage).length + Object.keys(sessionStorage).length") == 0


async def test_again_with_a_job_keeps_what_the_form_does_not_show(
    browser: Browser, tenants: _Tenants, tmp_path: Path
) -> None:
    file = tmp_path / "edges.png"
    file.write_bytes(_encoded("PNG"))
    options: Any = {
        "negative_prompt": "",
        "prompt_syntax": "weighted",
        "clip_skip": 1,
        "guidance_rescale": 0.2,
        "use_karras_sigmas": True,
        "timestep_spacing": "trailing",
        "shared_turns": False,
        "approximate_cache": False,
        "format": "jpeg",
        "quality": 80,
        "metadata": False,
        "controlnets": [ControlNet("edges", file, controlnet_conditioning_scale=0.5, guess_mode=True)],
    }
    async with (
        AsyncClient(tenants.gateway.address, api_key=tenants.ours) as client,
        opened(browser, tenants.url, may_complain=True) as tab,
    ):
        page = tab.page
        job = await client.submit("a kept star", **options)
        several = await client.submit(["a first moon", "a second moon"])
        await job.result()
        await several.result()
        await _sign_in(tab, tenants.ours)
        await page.get_by_role("button", name="API key set").wait_for()
        await page.get_by_role("link", name="History").click()
        await page.get_by_role("button", name="a first moon").click()
        await page.get_by_role("button", name="Again with these").click()
        await page.locator("form").get_by_text("Not taken over: the other prompt").wait_for()
        assert await page.get_by_label("Pictures", exact=True).input_value() == "1"
        await page.get_by_role("link", name="History").click()
        await page.get_by_role("button", name="a kept star").click()
        await page.get_by_role("button", name="Again with these").click()
        await page.get_by_role("button", name="Drop clip skip").click()
        await page.get_by_label("Control image of edges").set_input_files(file)
        await page.get_by_alt_text("Control image of edges").wait_for()
        await page.get_by_role("button", name="Draw").click()
        await page.wait_for_selector(".stage figure img")
        again = (await client.list_jobs()).jobs[0]
        first = (await job.status()).parameters
    assert again.parameters == replace(first, clip_skip=None)
    assert tenants.worker.requests[-1].spec.controlnets[0].image == file.read_bytes()


async def test_a_job_that_the_page_has_left_is_not_followed(browser: Browser, tenants: _Tenants) -> None:
    script = tenants.worker.script
    script.hold_at = 2
    asked: list[str] = []
    async with opened(browser, tenants.url, may_complain=True) as tab:
        page, streams = tab.page, "**/events?*"
        await page.clock.install()
        await _sign_in(tab, tenants.ours)
        await page.get_by_role("button", name="API key set").wait_for()
        await page.route(streams, lambda route: route.abort())
        page.on("request", lambda request: asked.append(request.url))
        await page.get_by_label("Prompt", exact=True).fill("ours alone")
        await page.get_by_role("button", name="Draw").click()
        await page.get_by_text("The connection is interrupted.").wait_for()
        await page.clock.pause_at(time.time() + 3600)  # until it tries again
        await page.unroute(streams)
        left = next(url for url in asked if "/events?" in url)
        await page.get_by_role("button", name="API key set").click()
        await _sign_in(tab, tenants.theirs)
        await page.get_by_label("Prompt", exact=True).fill("theirs alone")
        asked.clear()
        await page.get_by_role("button", name="Draw").click()
        await page.get_by_text("Step 2 of 30").wait_for()
        await page.clock.run_for(10_000)
        held, script.hold_at, script.release = script.release, None, asyncio.Event()
        held.set()
        await page.wait_for_selector(".stage figure img")
    assert left not in asked


async def test_a_page_that_attached_again_within_a_step_says_so(browser: Browser, tenants: _Tenants) -> None:
    script = tenants.worker.script
    script.hold_at = 2
    attached: list[str | None] = []

    async def attach(route: Route) -> None:
        attached.append(await route.request.header_value("last-event-id"))
        match len(attached):
            case 1:
                progress = {"steps_done": 2, "steps_total": 30, "previews": []}
                events = f"id: steps-2\nevent: job.progress\ndata: {json.dumps(progress)}\n\n"
                await route.fulfill(content_type="text/event-stream", body=events)
            case 2:
                await route.abort()
            case _:
                await route.continue_()

    async with opened(browser, tenants.url, may_complain=True) as tab:
        page = tab.page
        await page.route("**/events?*", attach)
        await _sign_in(tab, tenants.ours)
        await page.get_by_label("Prompt", exact=True).fill("a lasting star")
        await page.get_by_role("button", name="Draw").click()
        await page.get_by_text("The connection is interrupted.").wait_for()
        await page.get_by_text("Step 2 of 30").wait_for()
        held, script.hold_at, script.release = script.release, None, asyncio.Event()
        held.set()
        await page.wait_for_selector(".stage figure img")
    assert attached == [None, "steps-2", "steps-2"]


async def test_a_late_answer_to_no_key_is_dropped_after_signing_in(browser: Browser, tenants: _Tenants) -> None:
    keyless: list[Route] = []

    async def hold(route: Route) -> None:
        if await route.request.header_value("authorization"):
            await route.continue_()
        else:
            keyless.append(route)

    async with opened(browser, "about:blank", may_complain=True) as tab:
        page = tab.page
        for path in ("models", "loras", "controlnets"):
            await page.route(f"**/v1/{path}", hold)
        await page.goto(tenants.url)
        await eventually(lambda: len(keyless) == 3, "the page to ask for its lists")
        await page.get_by_role("button", name="API key", exact=True).click()
        await _sign_in(tab, tenants.ours)
        for route in keyless:
            async with page.expect_response(route.request.url):
                await route.continue_()
        await page.get_by_label("Prompt", exact=True).fill("nothing is in the way")
        assert not await page.locator("dialog").is_visible()


async def test_previews_come_and_a_picture_outlives_the_end_of_the_gateway(browser: Browser, tenants: _Tenants) -> None:
    script = tenants.worker.script
    script.hold_at = 2
    async with opened(browser, tenants.url, may_complain=True) as tab:
        page = tab.page
        await _sign_in(tab, tenants.ours)
        await page.get_by_role("button", name="API key set").wait_for()
        await page.get_by_label("Prompt", exact=True).fill("a patient star")
        await page.get_by_role("button", name="Draw").click()
        await page.get_by_text("Step 2 of 30").wait_for()
        await eventually(lambda: bool(tenants.worker.previewed), "the page to ask for previews")
        held, script.hold_at, script.release = script.release, 4, asyncio.Event()
        held.set()
        await page.wait_for_selector("img.preview")
        tenants.gateway.kill()
        await page.locator(".banner").wait_for()
        await page.get_by_text("The connection is interrupted.").wait_for()
        script.hold_at = None
        script.release.set()
        tenants.restart_gateway()
        await page.wait_for_selector(".stage figure img")
        await page.locator(".banner").wait_for(state="detached")
