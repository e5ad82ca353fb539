// One table as a row of the list. It is made with its name and its state; the figures are painted once it is seen.

import { element, icon } from "./element.js";
import { bytes, count, duration, headAndTail, short, visible } from "./format.js";
import { addressOf } from "./route.js";
import { drawSparkline, sparkline } from "./sparkline.js";
import { wordOf } from "./state.js";

/** The columns, in order: the word in the head, what a cell is called in the style sheet, and what it sorts by. */
export const COLUMNS = [
  { word: "Table", cell: "name", by: (table) => table.name },
  { word: "State", cell: "state", by: null },
  { word: "Copied", cell: "copied", by: (table) => table.rows_copied },
  { word: "Changes", cell: "changes", by: (table) => table.inserts + table.updates + table.deletes },
  { word: "Rows/s", cell: "rate", by: (table) => table.rows_per_second ?? -1 },
  { word: "Lag", cell: "lag", by: (table) => table.lag_seconds ?? table.lag_bytes ?? -1 },
];

/** The name as a link that is cut in its middle where there is no room: names of one database differ at their ends. */
export function nameLink(pipeline, name) {
  const [head, tail] = headAndTail(name);
  const dot = head.indexOf(".") + 1;
  return element(
    "a",
    { class: "name", href: addressOf(pipeline, name), title: visible(name), "aria-label": visible(name) },
    element("span", { class: "head" }, element("span", { class: "soft" }, head.slice(0, dot)), head.slice(dot)),
    tail ? element("span", { class: "tail" }, tail) : null,
  );
}

export class TableRow {
  isVisible = false;
  #isStale = true;
  #cells = {};
  #spark = null;

  constructor(pipeline, table) {
    this.table = table;
    // Roles are said again because a phone lays rows out as cards, and a browser then drops those of a table.
    this.link = nameLink(pipeline, table.name);
    const cells = COLUMNS.slice(1).map(
      ({ cell }) => (this.#cells[cell] = element("td", { role: "cell", class: cell })),
    );
    this.node = element(
      "tr",
      { role: "row" },
      element("th", { role: "rowheader", scope: "row", class: "name" }, this.link),
      cells,
    );
    this.#showState();
  }

  /** New figures; painted now if the row is seen. */
  update(table) {
    const before = this.table;
    this.table = table;
    this.#isStale = true;
    if (before.state !== table.state || before.paused_at !== table.paused_at) this.#showState();
    if (this.isVisible) this.paint();
  }

  /** Whether the row is seen was found to be different. */
  see(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) this.paint();
  }

  paint() {
    if (!this.#isStale) return;
    this.#isStale = false;
    this.node.setAttribute("data-painted", "");
    this.#paintCopied();
    this.#paintChanges();
    this.#paintRate();
    this.#paintLag();
  }

  #showState() {
    this.node.className = this.table.group;
    this.#cells.state.replaceChildren(statePill(this.table));
  }

  #paintCopied() {
    const { state, rows_copied: done, rows_total: total, seconds_left: left } = this.table;
    const cell = this.#cells.copied;
    if (state !== "DataSync" || !total) {
      cell.replaceChildren(short(done));
      cell.title = `${count(done)} rows were copied`;
      return;
    }
    // The total is the upstream's estimate; a copy may find more rows than that.
    const share = Math.min(0.99, done / total);
    const percent = Math.floor(share * 100);
    if (!cell.querySelector(".progress")) cell.replaceChildren(element("span"), progressBar(this.table.name));
    cell.title = `${count(done)} of about ${count(total)} rows`;
    cell.firstChild.textContent = left === null ? `${percent} %` : `${percent} % · ${duration(left)} left`;
    cell.lastChild.setAttribute("aria-valuenow", percent);
    cell.lastChild.firstChild.style.setProperty("width", `${percent}%`);
  }

  #paintChanges() {
    const { inserts, updates, deletes } = this.table;
    const cell = this.#cells.changes;
    if (cell.childElementCount === 0) {
      cell.replaceChildren(
        element("span", { class: "inserted" }),
        " ",
        element("span", { class: "updated" }),
        " ",
        element("span", { class: "deleted" }),
      );
    }
    const [inserted, updated, deleted] = cell.children;
    setText(inserted, `+${short(inserts)}`);
    setText(updated, `~${short(updates)}`);
    setText(deleted, `−${short(deletes)}`);
    const counted = `${count(inserts)} inserted, ${count(updates)} updated, ${count(deletes)} deleted`;
    cell.title = `${counted} since the last copy began`;
  }

  #paintRate() {
    const cell = this.#cells.rate;
    if (this.#spark === null) {
      this.#spark = sparkline();
      cell.replaceChildren(this.#spark, element("span"));
    }
    drawSparkline(this.#spark, this.table.hours);
    setText(cell.lastChild, short(this.table.rows_per_second));
  }

  #paintLag() {
    const { lag_seconds: seconds, lag_bytes: size } = this.table;
    const cell = this.#cells.lag;
    if (cell.childElementCount === 0) cell.replaceChildren(element("span"), element("span", { class: "soft" }));
    const [first, second] = cell.children;
    setText(first, seconds === null ? bytes(size) : duration(seconds));
    setText(second, seconds === null || size === null ? "" : bytes(size));
  }
}

export function statePill(table) {
  return element("span", { class: `pill ${table.group}` }, icon(table.group), wordOf(table));
}

function progressBar(name) {
  const values = {
    class: "progress",
    role: "progressbar",
    "aria-label": `Copy of ${name}`,
    "aria-valuemin": 0,
    "aria-valuemax": 100,
  };
  return element("div", values, element("i"));
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
