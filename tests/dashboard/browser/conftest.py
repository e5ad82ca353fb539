"""A browser, the dashboard's servers, and pages that tell of everything that went wrong in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

from tests.dashboard.browser.chromium import MissingError, axe_source, find_chromium
from tests.dashboard.browser.scene import Scene, make_hostile, make_many, make_never_run, make_shop, make_stopped

T = TypeVar("T")

TOKEN = "browser-test-token-0123456789"
TOKEN_NAME = "TAILRACE_TEST_DASHBOARD_TOKEN"


def require(make: Callable[[], T]) -> T:
    """What is made; without it the test is skipped with the reason, or fails where TAILRACE_REQUIRE_BROWSER is set."""
    try:
        return make()
    except MissingError as error:
        if os.environ.get("TAILRACE_REQUIRE_BROWSER"):
            pytest.fail(f"TAILRACE_REQUIRE_BROWSER is set, and {error}")
        pytest.skip(str(error))


# Not for the session: while Playwright is there its event loop runs, and other tests could run none.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = require(find_chromium)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=chromium.program, args=chromium.arguments, env={**os.environ, **chromium.environment}
        )
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The rules of accessibility, as a script."""
    return require(axe_source)


class DashboardProcess:
    """`tailrace dashboard` of some files on one port, which can be ended and started again."""

    def __init__(self, files: Sequence[Path], *options: str) -> None:
        self._files, self._options = files, options
        self._address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("tailrace")), "dashboard", *map(str, self._files), "--json"]
        self._process = subprocess.Popen(
            [*command, "--listen", self._address, *self._options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN_NAME: TOKEN},
        )
        assert self._process.stdout is not None
        first = json.loads(self._process.stdout.readline() or "{}")
        if "url" not in first:
            self._process.stdout.close()
            pytest.fail(f"the dashboard ended with {self._process.wait(60)} before it served: {first}")
        self.url: str = first["url"]
        self._address = self.url.partition("//")[2].rstrip("/")

    def stop(self) -> None:
        self._process.terminate()
        assert self._process.wait(60) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="session")
def scenes(folder: Path) -> Iterator[dict[str, Scene]]:
    """The pipelines, by name. Tests change nothing but desk, which is like shop, and warehouse."""
    with ExitStack() as opened:
        shops = [make_shop(folder), make_shop(folder, "desk")]
        made = [*shops, make_many(folder), make_hostile(folder), make_stopped(folder)]
        for scene in made:
            opened.callback(scene.close)
        yield {scene.name: scene for scene in made}


@pytest.fixture(scope="session")
def server(scenes: dict[str, Scene], folder: Path) -> Iterator[DashboardProcess]:
    """One server of all pipelines, and of one that never ran: events."""
    process = DashboardProcess([*(scene.file for scene in scenes.values()), make_never_run(folder)])
    yield process
    process.stop()


class Watch:
    """What a page said and asked for while it was open."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.problems = list[str]()
        self.requests = list[str]()
        self._origin = origin
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", self._on_request)
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        self.problems.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith((self._origin, "data:")):
            self.problems.append(f"request to another host: {request.url}")


OpenPage = Callable[..., Page]


@pytest.fixture
def watches() -> list[Watch]:
    """What the pages of the test said; a test that makes some of it happen on purpose clears it."""
    return []


@pytest.fixture
def open_page(browser: Browser, server: DashboardProcess, watches: list[Watch]) -> Iterator[OpenPage]:
    """`open_page("#/shop")` is that page of the server, loaded and filled; options are those of a browser's context.

    At the end no page has said anything on the console, or asked another host for anything.
    """
    with ExitStack() as opened:
        contexts = list[BrowserContext]()

        def open_(place: str = "", *, url: str = "", context: BrowserContext | None = None, **options: Any) -> Page:
            if context is None:
                context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
                opened.callback(context.close)
                contexts.append(context)
            context.set_default_timeout(30_000)
            page = context.new_page()
            watches.append(Watch(page, url or server.url))
            page.goto(f"{url or server.url}{place}")
            page.wait_for_selector("main > *")
            return page

        yield open_
        problems = [problem for watch in watches for problem in watch.problems]
    assert problems == []
