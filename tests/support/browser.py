"""A real browser for the tests of the page: Chromium of this machine, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Far more than anything takes on a machine that has other work.
_WAIT_MS = 60_000.0


def chromium() -> str | None:
    """The path of Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """A browser for as long as the block lasts."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=["--disable-gpu"])
        yield browser
        await browser.close()


@dataclass(slots=True, kw_only=True)
class Tab:
    """A page of the browser, with what its console said: errors, and violations of the policy."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, *, may_complain: bool = False, **options: Any) -> AsyncIterator[Tab]:
    """A tab with its own storage that shows a URL; at its end its console must be empty.

    may_complain: whether requests fail in this test, which Chromium writes to the console.
    """
    from playwright.async_api import TimeoutError

    context = await browser.new_context(bypass_csp=False, **options)
    page = await context.new_page()
    page.set_default_timeout(_WAIT_MS)
    tab = Tab(page=page)
    page.on("console", lambda said: tab.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    try:
        await page.goto(url)
        yield tab
        failed_requests = "Failed to load resource"
        assert [text for text in tab.complaints if not (may_complain and text.startswith(failed_requests))] == []
    except (TimeoutError, AssertionError) as error:
        error.add_note(f"The page shows:\n{await page.locator('body').inner_text()}\nIts console: {tab.complaints}")
        raise
    finally:
        await context.close()
