"""The page itself: themes, phones, accessibility, what it loads, and how it lives with its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browser.conftest import TOKEN, TOKEN_NAME, DashboardProcess, OpenPage, Watch
from tests.dashboard.browser.scene import Scene

pytestmark = pytest.mark.xdist_group("browser")

VIEWS = ("#/shop", "#/shop/public.payments", "#/shop/public.orders", "#/odd", "#/billing", "#/events", "#/gone")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
WIDE = """width => [...document.querySelectorAll("body *")]
    .filter(one => one.checkVisibility() && !one.closest(".scroll, .chips, .pipelines, thead, .unseen, .skip"))
    .filter(one => one.getBoundingClientRect().right > width + 1)
    .map(one => one.outerHTML.slice(0, 120))"""
"""What is wider than the screen, but for what can be moved on its own."""


def filled(page: Page) -> Page:
    expect(page.locator("#connection")).to_have_text("live")
    return page


@pytest.mark.parametrize(
    ("place", "theme"), [*((place, "light") for place in VIEWS), *((place, "dark") for place in VIEWS[:2])]
)
def test_axe_finds_nothing(open_page: OpenPage, axe: str, place: str, theme: str) -> None:
    page = filled(open_page(place, color_scheme=theme, reduced_motion="reduce"))
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert found["passes"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


@pytest.mark.parametrize("place", ["#/shop", "#/shop/public.payments"])
def test_axe_finds_nothing_on_a_phone_nor_in_a_dialog(open_page: OpenPage, axe: str, place: str) -> None:
    page = filled(open_page(place, reduced_motion="reduce", **PHONE))
    if "payments" in place:
        page.get_by_role("button", name="Copy again").click()
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


@pytest.mark.parametrize("place", VIEWS)
def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: OpenPage, place: str) -> None:
    page = filled(open_page(place, **PHONE))
    assert page.evaluate(WIDE, 390) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_on_a_phone_a_row_is_a_card_and_still_a_row_of_a_table(open_page: OpenPage) -> None:
    page = filled(open_page("#/shop", **PHONE))
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="public.orders", exact=True))
    row.scroll_into_view_if_needed()
    assert row.get_by_role("cell").count() == 5
    expect(row.locator("td.changes")).to_contain_text("+")
    boxes = [row.locator(place).bounding_box() for place in ("th", "td.state", "td.copied")]
    assert all(boxes)
    assert boxes[0]["y"] < boxes[2]["y"]  # type: ignore[index]


def test_the_theme_follows_the_system_until_one_is_chosen_and_is_kept(open_page: OpenPage) -> None:
    page = filled(open_page("#/shop", color_scheme="dark"))
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(12, 19, 23)"
    page.keyboard.press("t")
    assert page.evaluate(ground) == "rgb(244, 247, 248)"
    page.reload()
    filled(page)
    assert page.evaluate(ground) == "rgb(244, 247, 248)"
    expect(page.get_by_role("button", name="Theme: light. Change to dark")).to_be_visible()
    page.keyboard.press("t")
    page.keyboard.press("t")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)


def test_nothing_moves_for_those_who_asked_for_less_motion(open_page: OpenPage) -> None:
    moving = "document.getAnimations().length"
    assert filled(open_page("#/shop")).evaluate(moving) > 0
    assert filled(open_page("#/shop", reduced_motion="reduce")).evaluate(moving) == 0


def test_the_skip_link_and_the_focus_are_seen(open_page: OpenPage) -> None:
    page = filled(open_page("#/shop"))
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    expect(skip).to_be_focused()
    box = skip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"


def test_the_page_lets_nothing_run_that_is_not_its_own(open_page: OpenPage, watches: list[Watch]) -> None:
    page = filled(open_page("#/shop"))
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.foreign = true";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<img src='data:,x' onerror='window.foreign = true'>");
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.foreign") is None
    assert all("Content Security Policy" in problem for problem in watches[0].problems)
    assert len(watches[0].problems) >= 2
    watches.clear()


def test_seven_tabs_are_all_alive(open_page: OpenPage, scenes: dict[str, Scene]) -> None:
    first = filled(open_page("#/desk"))
    tabs = [first, *(filled(open_page("#/desk", context=first.context)) for _ in range(6))]
    cells = [tab.locator("tr", has_text="audit.events").locator("td.changes").first for tab in tabs]
    for tab, cell in zip(tabs, cells, strict=True):
        tab.bring_to_front()
        expect(cell).to_contain_text("+0 ")
    desk = scenes["desk"]
    desk.apply(desk.change("audit.events", 17))
    for tab, cell in zip(tabs, cells, strict=True):
        tab.bring_to_front()
        expect(cell).to_contain_text("+17 ", timeout=30_000)


def test_a_hidden_page_asks_for_nothing_and_asks_at_once_when_it_is_seen(
    open_page: OpenPage, watches: list[Watch]
) -> None:
    page = filled(open_page("#/shop"))
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(500)
    asked = len(watches[0].requests)
    page.wait_for_timeout(4500)
    assert len(watches[0].requests) == asked
    with page.expect_request("**/api/v1/pipelines"):
        page.evaluate(hide, False)


def test_what_did_not_change_is_not_sent_again(open_page: OpenPage) -> None:
    page = filled(open_page("#/billing"))
    answers = list[tuple[str, int]]()
    page.on("response", lambda answer: answers.append((answer.url.partition("/api/v1/")[2], answer.status)))
    page.wait_for_timeout(5000)
    tables = [status for path, status in answers if path.startswith("pipelines/billing/tables")]
    assert len(tables) >= 2
    assert set(tables[1:]) == {304}


@pytest.fixture
def own_server(folder: Path, scenes: dict[str, Scene]) -> Iterator[DashboardProcess]:
    """A server of one pipeline, for one test, that wants a token."""
    process = DashboardProcess([scenes["shop"].file], "--token-env", TOKEN_NAME)
    yield process
    process.stop()


def test_a_server_that_is_gone_is_said_and_so_that_it_is_back(
    open_page: OpenPage, own_server: DashboardProcess, watches: list[Watch]
) -> None:
    page = filled(open_page(f"#token={TOKEN}", url=own_server.url))
    own_server.stop()
    connection = page.locator("#connection")
    expect(connection).to_contain_text("no connection since ", timeout=30_000)
    expect(page.get_by_role("region", name="Health")).to_be_visible()
    own_server.start()
    expect(connection).to_have_text("live", timeout=60_000)
    assert all("ERR_CONNECTION_REFUSED" in problem for problem in watches[0].problems)
    watches.clear()


def test_an_answer_that_the_page_does_not_understand_is_said_and_the_next_one_is_shown(
    open_page: OpenPage, watches: list[Watch]
) -> None:
    page = filled(open_page("#/shop"))
    page.route("**/api/v1/pipelines", lambda route: route.fulfill(json={"pipelines": [{"name": 1}]}))
    connection = page.locator("#connection")
    expect(connection).to_have_text("this page has met an error: reload it", timeout=30_000)
    page.unroute("**/api/v1/pipelines")
    expect(connection).to_have_text("live", timeout=30_000)
    assert all("TypeError" in problem for problem in watches[0].problems)
    watches.clear()


def test_the_token_of_the_address_logs_in_and_leaves_it(open_page: OpenPage, own_server: DashboardProcess) -> None:
    page = filled(open_page(f"#token={TOKEN}", url=own_server.url))
    assert TOKEN not in page.url
    expect(page.get_by_role("heading", level=1)).to_contain_text("public.payments")
    # One pipeline alone needs no switch.
    expect(page.get_by_role("navigation", name="Pipelines")).to_be_hidden()
    assert page.evaluate("document.cookie") == ""
    [cookie] = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    assert TOKEN not in page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")


def test_without_a_token_the_page_asks_for_one(
    open_page: OpenPage, own_server: DashboardProcess, axe: str, watches: list[Watch]
) -> None:
    page = open_page(url=own_server.url)
    expect(page.get_by_role("heading", level=1)).to_have_text("This dashboard needs a token")
    page.evaluate(axe)
    assert page.evaluate("axe.run().then(found => found.violations.map(each => each.id))") == []
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_have_text("This is not the token.")
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Health")).to_be_visible()
    assert [problem for problem in watches[0].problems if "401 (Unauthorized)" not in problem] == []
    watches.clear()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('', 'SecurityError'); }})",
            id="nothing may be stored",
        ),
        pytest.param(
            "Object.defineProperty(navigator, 'language', {value: 'en-US@posix', configurable: true})",
            id="no language",
        ),
    ],
)
def test_the_page_works_in_a_browser_that_lacks_something(
    browser: Browser, server: DashboardProcess, script: str
) -> None:
    context = browser.new_context()
    context.add_init_script(script)
    page = context.new_page()
    page.goto(f"{server.url}#/shop")
    expect(filled(page).locator(".plot canvas")).to_have_count(2)
    page.keyboard.press("t")
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    context.close()
