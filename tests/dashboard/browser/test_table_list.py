"""The list of tables: filters, search, order, keys, names, and what five hundred tables cost."""

from __future__ import annotations

import threading
import time

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.browser.conftest import OpenPage
from tests.dashboard.browser.scene import HOSTILE, Scene

pytestmark = pytest.mark.xdist_group("browser")

CUT = """() => [...document.querySelectorAll(".list td")]
    .filter(cell => cell.scrollWidth > cell.clientWidth)
    .map(cell => cell.innerText)"""
"""The texts of cells that are wider than their column."""
MEASURED_SECONDS = 6
MOST_CPU = 0.6
"""A part of one core. The figure itself is printed; this only tells a page that has lost its way."""


def names(page: Page) -> list[str]:
    """The names of the rows that are shown, from the top."""
    return page.locator("tbody tr:visible a.name").all_text_contents()


def shown(name: str) -> str:
    """A hostile name as the page has to show it."""
    return name.replace("\u202e", "⟨U+202E⟩").replace("\u202c", "⟨U+202C⟩").replace("\n", "⟨U+000A⟩")


def cells(page: Page, name: str) -> dict[str, str]:
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
    return {
        cell: " ".join(row.locator(f"td.{cell}").inner_text().split())
        for cell in ("state", "copied", "changes", "rate", "lag")
    }


@pytest.fixture
def shop(open_page: OpenPage) -> Page:
    page = open_page("#/shop")
    page.wait_for_selector("tr[data-painted]")
    return page


def test_rows_have_state_progress_changes_rate_and_lag(shop: Page) -> None:
    stopped = cells(shop, "public.payments")
    assert stopped["state"] == "Stopped"
    assert stopped["copied"] == "22.9 m"
    assert stopped["changes"] == "+13.2 k ~17.8 k \N{MINUS SIGN}0"
    expect(shop.locator("tr", has_text="public.payments").locator("td.rate").first).to_have_text("0")
    assert stopped["lag"].endswith("kB")
    assert cells(shop, "public.order_items")["copied"] == "63 %"
    bar = shop.get_by_role("progressbar", name="Copy of public.order_items")
    expect(bar).to_have_attribute("aria-valuenow", "63")
    assert cells(shop, "audit.events")["state"] == "Paused"
    assert cells(shop, "public.orders")["state"] == "Following"


def test_the_time_that_a_copy_still_takes_is_shown(open_page: OpenPage, scenes: dict[str, Scene]) -> None:
    desk = scenes["desk"]
    page = open_page("#/desk")
    cell = page.locator("tr", has_text="public.order_items").locator("td.copied")
    copied = 0
    deadline = time.monotonic() + 60
    while "left" not in cell.inner_text():
        copied += 1
        desk.apply(desk.copy_more("public.order_items", 1_000_000))
        page.wait_for_timeout(500)
        assert time.monotonic() < deadline, cell.inner_text()
    assert copied > 0
    for name in ("customers", "inventory"):
        desk.apply(desk.change(f"public.{name}", 98_800, 97_700, 96_600))
    expect(page.locator("td.changes").filter(has_text="\N{MINUS SIGN}96.6 k")).to_have_count(2)
    assert page.evaluate(CUT) == []


def test_what_needs_someone_comes_first_and_each_column_sorts(shop: Page) -> None:
    assert names(shop) == [
        "public.payments",
        "public.order_items",
        "audit.events",
        "public.customers",
        "public.inventory",
        "public.orders",
    ]
    head = shop.get_by_role("table", name="Tables").get_by_role("columnheader", name="Table", exact=True)
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert names(shop) == sorted(names(shop))
    head.get_by_role("button").click()
    assert names(shop) == sorted(names(shop), reverse=True)
    shop.get_by_role("button", name="Copied").click()
    assert names(shop)[0] == "audit.events"
    shop.get_by_role("button", name="Changes").click()
    assert names(shop)[0] == "public.inventory"


def test_filters_narrow_the_list_and_stand_in_the_address(shop: Page) -> None:
    shown = shop.locator("tbody tr:visible a.name")
    shop.get_by_role("button", name="Following 3").click()
    expect(shown).to_have_text(["public.customers", "public.inventory", "public.orders"])
    assert shop.url.endswith("?show=following")
    shop.get_by_role("button", name="Paused 1").click()
    expect(shown).to_have_text(["audit.events"])
    shop.get_by_role("button", name="All 6").click()
    expect(shown).to_have_count(6)


def test_the_search_finds_parts_of_names_and_says_when_it_finds_none(shop: Page) -> None:
    shop.get_by_label("Find a table").fill("ORDER")
    assert names(shop) == ["public.order_items", "public.orders"]
    expect(shop.get_by_text("2 of 6 tables")).to_be_visible()
    shop.get_by_label("Find a table").fill("<b>none")
    expect(shop.get_by_text("No table matches “<b>none”.")).to_be_visible()
    shop.get_by_role("button", name="Show all tables").click()
    assert len(names(shop)) == 6


def test_keys_find_move_open_and_go_back(shop: Page) -> None:
    shop.keyboard.press("/")
    expect(shop.get_by_label("Find a table")).to_be_focused()
    shop.keyboard.type("orders")
    assert names(shop) == ["public.orders"]
    shop.keyboard.press("Escape")
    assert len(names(shop)) == 6
    for key in "jjjk":
        shop.keyboard.press(key)
    expect(shop.get_by_role("link", name="public.order_items", exact=True)).to_be_focused()
    shop.keyboard.press("Enter")
    expect(shop.get_by_role("heading", level=1)).to_have_text("public.order_items")
    shop.keyboard.press("Escape")
    expect(shop.get_by_role("region", name="Tables")).to_be_visible()
    shop.keyboard.press("?")
    expect(shop.get_by_role("dialog", name="Keyboard")).to_be_visible()
    shop.keyboard.press("Escape")
    expect(shop.get_by_role("dialog", name="Keyboard")).to_be_hidden()


def test_hostile_names_are_text_and_what_cannot_be_seen_in_them_is_shown(open_page: OpenPage) -> None:
    page = open_page("#/odd")
    page.wait_for_selector("tr[data-painted]")
    assert sorted(names(page)) == sorted(map(shown, HOSTILE))
    assert page.locator("img, main script").count() == 0
    expect(page.get_by_role("region", name="What happened")).to_contain_text("<script>alert(2)</script> ⟨U+202E⟩reason")


def test_every_table_can_be_opened_whatever_its_name(open_page: OpenPage) -> None:
    page = open_page("#/odd")
    page.wait_for_selector("tr[data-painted]")
    for name in HOSTILE:
        href = page.evaluate("name => '#/odd/' + encodeURIComponent(name)", name)
        page.locator(f"tbody a.name[href='{href}']").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(shown(name))
        expect(page.get_by_role("region", name="What you can do")).to_be_visible()
        page.keyboard.press("Escape")


def test_of_a_long_name_the_end_is_always_seen(open_page: OpenPage) -> None:
    page = open_page("#/odd")
    for name in HOSTILE[3:5]:
        link = page.get_by_role("link", name=name, exact=True)
        cell, tail = link.locator("..").bounding_box(), link.locator(".tail").bounding_box()
        assert cell is not None
        assert tail is not None
        assert tail["x"] + tail["width"] <= cell["x"] + cell["width"] + 1
        expect(link.locator(".tail")).to_have_text(name[-len("_ends_with_1") :])
        expect(link).to_have_attribute("title", name)


def test_of_five_hundred_tables_only_those_are_painted_that_are_seen(open_page: OpenPage) -> None:
    page = open_page("#/warehouse")
    page.wait_for_selector("tr[data-painted]")
    expect(page.locator("tbody tr")).to_have_count(500)
    assert page.locator("tr[data-painted]").count() < 60
    last = page.locator("tbody tr").last
    last.scroll_into_view_if_needed()
    expect(last.locator("td.changes")).to_contain_text("+")
    assert page.locator("tr[data-painted]").count() < 120


def test_five_hundred_tables_that_all_change_cost_little(
    open_page: OpenPage, scenes: dict[str, Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    many, stop = scenes["warehouse"], threading.Event()
    tables = [table.name for table in many.store.tables()]

    def write() -> None:
        while not stop.wait(0.9):
            many.apply(*(many.change(name, 3, 20, 1) for name in tables))

    page = open_page("#/warehouse")
    page.wait_for_selector("tr[data-painted]")
    before = page.locator("tbody tr td.changes").first.inner_text()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # the thread's own time, whatever else runs

    def spent() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        begun = spent()
        page.wait_for_timeout(MEASURED_SECONDS * 1000)
        cpu = (spent() - begun) / MEASURED_SECONDS
    finally:
        stop.set()
        writer.join()
    with capsys.disabled():
        print(f"\n500 tables that change each second: {1000 * cpu:.0f} ms of the page's main thread a second")
    assert page.locator("tbody tr td.changes").first.inner_text() != before
    assert cpu < MOST_CPU
