"""The view of one table: its error and the way out of it, what can be asked for it, its columns and its counts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tailrace.state.record import OperatorRequest
from tests.dashboard.browser.conftest import OpenPage, Watch
from tests.dashboard.browser.scene import Scene, later

pytestmark = pytest.mark.xdist_group("browser")

PAYMENTS = "#/desk/public.payments"


@pytest.fixture
def desk(scenes: dict[str, Scene]) -> Iterator[Scene]:
    """The pipeline that requests are left for; those that a test leaves open are settled after it."""
    scene = scenes["desk"]
    yield scene
    for request in scene.store.open_requests():
        scene.store.finish_request(request.id, "the test is over")


def asked(page: Page) -> str:
    return " ".join(page.get_by_role("region", name="What was asked for").inner_text().split())


def only_request(scene: Scene) -> OperatorRequest:
    [request] = scene.store.open_requests()
    return request


def press(page: Page, name: str) -> None:
    """Press a button and wait until the server has answered."""
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        page.get_by_role("button", name=name, exact=True).click()


def test_an_error_has_its_reason_its_code_its_fix_and_when_it_is_tried_again(open_page: OpenPage) -> None:
    page = open_page("#/shop/public.payments")
    error = page.get_by_role("region", name="Why it stopped")
    expect(error).to_contain_text("column amount: numeric(28,2) does not hold a value of 31 digits")
    expect(error.locator("header code")).to_have_text("unfit")
    commands = error.locator(".command code").all_text_contents()
    assert [re.sub(r"\S+shop\.yaml", "shop.yaml", each) for each in commands] == [
        "tailrace resync shop.yaml public.payments",
        "tailrace skip shop.yaml public.payments",
    ]
    expect(error).to_contain_text(re.compile(r"Tried 5 of \d+ times\. It waits until someone fixes the cause"))
    expect(error).to_contain_text(re.compile(r"Its log is kept until .*; after that only a new copy helps\."))


def test_a_reason_of_several_lines_keeps_them(open_page: OpenPage) -> None:
    page = open_page("#/odd")
    page.get_by_role("link", name="See what to do").click()
    reason = page.get_by_role("region", name="Why it stopped").locator(".reason")
    assert reason.inner_text().split("\n") == ["<script>alert(2)</script> ⟨U+202E⟩reason", "of two lines"]


def test_a_table_that_is_tried_again_by_itself_says_when(open_page: OpenPage, desk: Scene) -> None:
    desk.store.fail_table("public.customers", "the disk is full", retry="timed", attempts=2, next_try=later(90))
    page = open_page("#/desk/public.customers")
    expect(page.locator("#tries")).to_contain_text(re.compile(r"The next try is in (1 min|2 min|\d\d s), at "))
    desk.store.recover_table("public.customers")
    expect(page.get_by_role("region", name="Why it stopped")).to_be_hidden()


def test_a_command_is_copied_to_the_clipboard(open_page: OpenPage) -> None:
    page = open_page("#/shop/public.payments", permissions=["clipboard-read", "clipboard-write"])
    error = page.get_by_role("region", name="Why it stopped")
    error.get_by_role("button", name=re.compile("^Copy: tailrace resync")).click()
    expect(page.locator("#toast")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == error.locator(".command code").first.inner_text()


def test_without_the_clipboard_a_command_is_selected(open_page: OpenPage) -> None:
    page = open_page("#/shop/public.payments")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_role("button", name=re.compile("^Copy: tailrace resync")).first.click()
    expect(page.locator("#toast")).to_have_text("Selected: copy it with Ctrl-C")
    assert "tailrace resync" in page.evaluate("getSelection().toString()")


def test_a_retry_is_left_for_the_runner_and_what_became_of_it_is_shown(open_page: OpenPage, desk: Scene) -> None:
    page = open_page(PAYMENTS)
    press(page, "Retry now")
    expect(page.locator("#toast")).to_contain_text("public.payments will be tried again")
    request = only_request(desk)
    assert (request.kind, request.table) == ("retry", "public.payments")
    expect(page.get_by_role("region", name="What was asked for")).to_contain_text("retry: not done yet")
    expect(page.get_by_role("button", name="Retry now: asked")).to_be_disabled()
    expect(page.get_by_role("button", name="Retry now: asked")).to_be_focused()
    desk.store.finish_request(request.id, "it failed again: the value is still there")
    expect(page.get_by_role("region", name="What was asked for")).to_contain_text(
        "retry: it failed again: the value is still there"
    )
    expect(page.get_by_role("button", name="Retry now", exact=True)).to_be_enabled()


def test_a_new_copy_says_what_it_costs_and_is_asked_for_only_after_a_yes(open_page: OpenPage, desk: Scene) -> None:
    page = open_page(PAYMENTS)
    page.get_by_role("button", name="Copy again").click()
    dialog = page.get_by_role("dialog", name="Copy again: public.payments?")
    expect(dialog).to_contain_text("22,871,002 the last time")
    expect(dialog.locator(".command code")).to_have_text(re.compile(r"tailrace resync \S*desk\.yaml public\.payments"))
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Copy again")).to_be_focused()
    assert desk.store.open_requests() == []
    page.get_by_role("button", name="Copy again").click()
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        dialog.get_by_role("button", name="Copy again").click()
    assert only_request(desk).kind == "resync"


def test_to_skip_says_what_is_lost_and_can_be_declined(open_page: OpenPage, desk: Scene) -> None:
    page = open_page(PAYMENTS)
    page.get_by_role("button", name="Skip what stopped it").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("lacks them until it is copied again")
    dialog.get_by_role("button", name="Not now").click()
    expect(dialog).to_be_hidden()
    assert desk.store.open_requests() == []


def test_a_table_is_paused_and_resumed(open_page: OpenPage, desk: Scene) -> None:
    page = open_page("#/desk/public.inventory")
    press(page, "Pause")
    desk.store.pause_table("public.inventory")
    desk.store.finish_request(only_request(desk).id, "paused")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.locator(".title .pill")).to_have_text("Paused")
    press(page, "Resume")
    desk.store.resume_table("public.inventory")
    desk.store.finish_request(only_request(desk).id, "resumed")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    assert re.search(r"resume: resumed .* pause: paused", asked(page))


def test_what_cannot_be_done_has_no_button_and_every_button_has_its_command(open_page: OpenPage) -> None:
    page = open_page("#/shop/public.orders")
    actions = page.get_by_role("region", name="What you can do")
    assert actions.get_by_role("button").all_inner_texts() == ["Copy again", "Pause"]
    actions.get_by_text("The same on the command line").click()
    shown = [re.sub(r"\S+shop\.yaml", "shop.yaml", each) for each in actions.locator(".command code").all_inner_texts()]
    assert sorted(shown) == ["tailrace pause shop.yaml public.orders", "tailrace resync shop.yaml public.orders"]


def test_a_refused_request_is_said_with_its_reason(open_page: OpenPage, desk: Scene) -> None:
    page = open_page("#/desk/audit.events")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    desk.store.resume_table("audit.events")
    press(page, "Resume")
    expect(page.locator("#toast")).to_contain_text("audit.events is not paused: nothing to do")
    desk.store.pause_table("audit.events")


def test_columns_over_time_counts_by_hour_and_figures(open_page: OpenPage) -> None:
    page = open_page("#/shop/public.orders")
    columns = page.get_by_role("region", name="Columns over time")
    assert [" ".join(item.split()) for item in columns.get_by_role("listitem").all_inner_texts()] == [
        "v2 gift_note text added",
        "v1 3 columns",
    ]
    columns.get_by_text("4 columns now").click()
    expect(columns).to_contain_text("numeric(28,2)")
    chart = page.get_by_role("img", name=re.compile("^Changes per hour. inserted: "))
    expect(chart.locator("canvas")).to_be_visible()
    figures = " ".join(page.get_by_role("region", name="Figures").inner_text().split())
    assert re.search(r"Copied 48\.2 m .* Inserted 2\d\.\d k Updated 5\d\.\d k Deleted 3\d\d Lag", figures)


def test_dead_letters_have_no_values(open_page: OpenPage) -> None:
    page = open_page("#/shop/public.payments")
    letters = page.get_by_role("region", name="Dead letters")
    expect(letters).to_contain_text("UnfitError, v1")
    expect(letters).to_contain_text("values are never shown here")
    assert "canary-9000001" not in page.content()


def test_an_address_of_no_table_says_so(open_page: OpenPage, watches: list[Watch]) -> None:
    page = open_page("#/shop/public.gone")
    expect(page.get_by_role("heading", level=1)).to_contain_text("has no such table")
    page.get_by_role("link", name="Back").click()
    expect(page.get_by_role("region", name="Tables")).to_be_visible()
    assert all("404 (Not Found)" in problem for problem in watches[0].problems)
    watches.clear()
