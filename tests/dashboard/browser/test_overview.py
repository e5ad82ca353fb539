"""The overview of a pipeline: every panel, with what the state says."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.browser.conftest import OpenPage

pytestmark = pytest.mark.xdist_group("browser")

SHOWN_TEXTS = """() => {
    const texts = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode;
        const parent = node.parentElement;
        if (!node.data.trim() || !parent.checkVisibility() || parent.closest(".unseen, noscript")) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        texts.push([node.data, range.getBoundingClientRect().width]);
    }
    return texts;
}"""


def panel(page: Page, title: str) -> str:
    """The text of the panel of this title, with single spaces."""
    region = page.get_by_role("region", name=title, exact=True)
    expect(region).to_be_visible()
    return " ".join(region.inner_text().split())


@pytest.fixture
def shop(open_page: OpenPage) -> Page:
    return open_page("#/shop")


def test_the_sentence_says_what_is_wrong_and_its_button_leads_there(shop: Page) -> None:
    health = shop.get_by_role("region", name="Health")
    expect(health.get_by_role("heading")).to_have_text("1 of 6 tables needs you: public.payments")
    health.get_by_role("link", name="See what to do").click()
    expect(shop.get_by_role("heading", level=1)).to_have_text("public.payments")


def test_where_several_tables_stopped_the_button_shows_all_of_them(open_page: OpenPage) -> None:
    page = open_page("#/warehouse")
    page.get_by_role("region", name="Health").get_by_role("link", name="See all 6").click()
    expect(page.get_by_role("button", name="Needs you 6")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("tbody tr:visible")).to_have_count(6)
    assert page.url.endswith("#/warehouse?show=errored")


def test_the_way_of_a_change_has_its_stages_with_figures(shop: Page) -> None:
    stages = shop.get_by_role("list", name="The way of a change").get_by_role("listitem")
    texts = [" ".join(text.split()) for text in stages.all_inner_texts()]
    assert [text.split()[0] for text in texts] == ["Source", "Slot", "Journal", "Batch", "Destination:"]
    assert "2.9 GB" in texts[1]
    assert "72% of what it may" in texts[1]
    assert "84.0 MB" in texts[2]
    assert "write takes 60% of it" in texts[3]


def test_the_slot_says_when_it_is_full(shop: Page) -> None:
    text = panel(shop, "Replication slot")
    assert "tailrace_shop" in text
    assert "2.9 GB kept of 4.0 GB allowed" in text
    assert re.search(r"Full in 3 h (39|4\d) min, at ", text)
    assert "Grows by 83.0 kB/s" in text
    assert "retry or resume what stands still; or let the server keep more: ALTER SYSTEM SET" in text
    assert text.count("max_slot_wal_keep_size") == 1
    assert re.search(r"Confirmed 2A/80\w{6}", text)
    meter = shop.get_by_role("meter", name="Log kept for the slot")
    expect(meter).to_have_attribute("aria-valuetext", "2.9 GB of 4.0 GB")
    inside, outside = meter.locator("i").bounding_box(), meter.bounding_box()
    assert inside is not None
    assert outside is not None
    assert 0.6 < inside["width"] / outside["width"] < 0.8


def test_batches_are_bars_split_by_their_phases(shop: Page) -> None:
    text = panel(shop, "Batches")
    assert "read decode collapse write commit" in text
    bars = shop.locator(".batches li")
    expect(bars).to_have_count(12)
    label = bars.first.get_by_role("img").get_attribute("aria-label") or ""
    assert re.fullmatch(
        r"Batch 29, [\d:]+: 339 rows, 40\.7 kB in 1\.4 s\. read 0\.1 s, .*, write 0\.8 s, commit 0\.3 s", label
    )
    widths = [bars.first.locator(f".phase-{number}").bounding_box() for number in (1, 4)]
    assert all(widths)
    assert widths[1]["width"] > 5 * widths[0]["width"]  # type: ignore[index]


def test_charts_draw_the_recorded_series_and_say_it_in_words(shop: Page) -> None:
    assert re.search(r"changes [\d.,]+ ?k?", panel(shop, "Rows per second"))
    chart = shop.get_by_role("img", name=re.compile("^Rows per second. changes: .* at the end, between .* and .*"))
    expect(chart.locator("canvas")).to_be_visible()
    drawn = """canvas => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(Array.from({length: pixels.length / 4}, (_, i) => pixels.slice(4 * i, 4 * i + 3).join())).size;
    }"""
    assert chart.locator("canvas").evaluate(drawn) > 10


def test_the_lag_is_shown_in_seconds_and_in_bytes(shop: Page) -> None:
    lag = shop.get_by_role("region", name="Lag", exact=True)
    expect(lag).to_contain_text(re.compile(r"lag [\d.]+ s"))
    lag.get_by_role("button", name="Bytes").click()
    expect(lag).to_contain_text(re.compile(r"lag [\d.]+ MB"))


def test_another_time_can_be_shown(shop: Page) -> None:
    with shop.expect_response(lambda answer: answer.url.endswith("/pipelines/shop?hours=24")):
        shop.get_by_role("button", name="24 h").click()
    expect(shop.get_by_role("button", name="24 h")).to_have_attribute("aria-pressed", "true")


def test_what_happened_what_was_asked_for_what_waits_and_what_is_left_out(shop: Page) -> None:
    happened = panel(shop, "What happened")
    assert "public.payments stopped: column amount: numeric(28,2) does not hold a value of 31 digits" in happened
    assert "audit.events was paused" in happened
    assert "pause audit.events: paused" in panel(shop, "What was asked for")
    letters = panel(shop, "Dead letters")
    assert "UnfitError, v1" in letters
    assert "does not hold a value of 31 digits" in letters
    alerts = panel(shop, "Alerts")
    assert "1 table is in error: public.payments" in alerts
    assert "told at" in alerts
    assert "It could not be sent: https://hooks.example does not answer" in alerts
    assert "slot" not in alerts
    left_out = panel(shop, "Left out")
    assert "public.tmp_import it has no primary key" in left_out
    assert "ALTER TABLE public.tmp_import ADD PRIMARY KEY (id)" in left_out


def test_no_value_of_a_row_is_on_the_page(shop: Page) -> None:
    assert "canary-9000001" not in shop.content()
    assert "reader@db.example" not in shop.content()


def test_every_text_has_width(shop: Page) -> None:
    shop.wait_for_selector(".plot canvas")
    texts = shop.evaluate(SHOWN_TEXTS)
    assert len(texts) > 150
    assert [text for text, width in texts if width <= 0] == []


def test_a_pipeline_that_does_not_run_says_how_to_start_it(open_page: OpenPage) -> None:
    page = open_page("#/billing")
    health = page.get_by_role("region", name="Health")
    expect(health.get_by_role("heading")).to_have_text("billing does not run")
    expect(health.locator("code").last).to_have_text(re.compile(r"tailrace run \S*billing\.yaml"))
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_pipeline_that_never_ran_says_so_and_shows_nothing_else(open_page: OpenPage) -> None:
    page = open_page("#/events")
    expect(page.get_by_role("heading", level=1)).to_contain_text("has not run yet")
    expect(page.get_by_role("region", name="Tables")).to_be_hidden()


def test_the_switch_has_every_pipeline_with_how_it_is(open_page: OpenPage) -> None:
    page = open_page()
    switch = page.get_by_role("navigation", name="Pipelines")
    assert [" ".join(text.split()) for text in switch.get_by_role("link").all_inner_texts()] == [
        "shop",
        "desk",
        "warehouse",
        "odd",
        "billing",
        "events",
    ]
    expect(switch.get_by_role("link", name="failing shop")).to_have_attribute("aria-current", "page")
    switch.get_by_role("link", name="stopped billing").click()
    expect(page).to_have_title("billing · tailrace")


def test_an_address_of_no_pipeline_says_so(open_page: OpenPage) -> None:
    page = open_page("#/gone")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no pipeline gone here.")
    page.get_by_role("link", name="Back").click()
    expect(page).to_have_title("shop · tailrace")
