"""The drawings of the documentation, as a browser draws them with the fonts of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

pytestmark = pytest.mark.xdist_group("browser")

DOCS = Path(__file__).parents[3] / "docs"
MISFITS = """() => {
    const texts = [...document.querySelectorAll("text")].map((node) => [node.textContent, node.getBBox()]);
    const [, , width, height] = document.documentElement.getAttribute("viewBox").split(" ").map(Number);
    const boxes = [...document.querySelectorAll("rect.box")].map((node) => node.getBBox());
    const isIn = (one, x, y, right, bottom) =>
        one.x >= x && one.y >= y && one.x + one.width <= right && one.y + one.height <= bottom;
    const meet = (one, other) =>
        one.x < other.x + other.width && other.x < one.x + one.width &&
        one.y < other.y + other.height && other.y < one.y + one.height;
    const wrong = [];
    for (const [index, [text, one]] of texts.entries()) {
        if (one.width < 10) wrong.push(`${text}: no letter is drawn`);
        if (!isIn(one, 0, 0, width, height)) wrong.push(`${text}: beyond the drawing`);
        for (const box of boxes)
            if (meet(one, box) && !isIn(one, box.x + 4, box.y, box.x + box.width - 4, box.y + box.height))
                wrong.push(`${text}: beyond its box`);
        for (const [other, two] of texts.slice(index + 1))
            if (meet(one, two)) wrong.push(`${text}: over ${other}`);
    }
    return wrong;
}"""


@pytest.mark.parametrize("drawing", sorted(DOCS.glob("*.svg")), ids=lambda drawing: drawing.name)
def test_every_text_of_a_drawing_has_its_place(browser: Browser, drawing: Path) -> None:
    page = browser.new_page()
    page.goto(drawing.as_uri())
    assert page.evaluate(MISFITS) == []
    page.close()
