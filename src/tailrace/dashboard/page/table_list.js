// All tables of a pipeline: filters, search, order. Every table has a row; figures are painted where they are seen.

import { element, refill } from "./element.js";
import { visible } from "./format.js";
import { FILTERS, GROUPS, wordOf } from "./state.js";
import { COLUMNS, TableRow } from "./table_row.js";

const MARGIN = "200px";
const MATTERS_MOST = "state";

export class TableList {
  #pipeline;
  #rows = new Map();
  #byNode = new Map();
  #shown = "all";
  #order = { cell: MATTERS_MOST, falls: false };
  #body = element("tbody", { role: "rowgroup" });
  #count = element("span", { class: "soft small", role: "status" });
  #chips = element("div", { class: "chips" });
  #empty = element("div", { class: "empty", hidden: true });
  #heads;
  #table;
  #watch = new IntersectionObserver((seen) => this.#see(seen), { rootMargin: MARGIN });

  /** `choose` is called with the filter that was pressed. */
  constructor(pipeline, choose) {
    this.#pipeline = pipeline;
    this.choose = choose;
    this.search = element("input", {
      type: "search",
      id: "search",
      placeholder: "Find a table   /",
      "aria-label": "Find a table",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.#arrange(),
    });
    this.#heads = COLUMNS.map((column) => this.#head(column));
    this.#table = element(
      "table",
      { role: "table", "aria-labelledby": "tables" },
      element(
        "colgroup",
        {},
        COLUMNS.map(({ cell }) => element("col", { class: cell })),
      ),
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, this.#heads)),
      this.#body,
    );
    this.node = element(
      "section",
      { class: "card list", "aria-labelledby": "tables" },
      element("header", {}, element("h2", { id: "tables" }, "Tables"), this.#count),
      element(
        "div",
        { class: "tools", role: "group", "aria-label": "Which tables are shown" },
        this.search,
        this.#chips,
      ),
      this.#table,
      this.#empty,
    );
    this.#showOrder();
  }

  /** Take the rows that have changed, or all of them: then the list is `complete`. `gone` are ids of tables that are
   *  not followed any more. */
  update({ tables, gone, complete }) {
    const ids = new Set(tables.map((table) => table.id));
    const dropped = complete ? [...this.#rows.keys()].filter((id) => !ids.has(id)) : gone;
    for (const id of dropped) this.#drop(id);
    for (const table of tables) {
      const known = this.#rows.get(table.id);
      if (known) known.update(table);
      else this.#add(table);
    }
    this.#arrange();
  }

  /** Show the tables of one filter. */
  show(filter) {
    this.#shown = FILTERS.some(([word]) => word === filter) ? filter : "all";
    this.#arrange();
  }

  /** Move the focus by so many rows. */
  move(step) {
    const links = [...this.#rows.values()]
      .filter((row) => !row.node.hidden)
      .sort(byPlace)
      .map((row) => row.link);
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(at + step, links.length - 1))]?.focus();
  }

  close() {
    this.#watch.disconnect();
  }

  #add(table) {
    const row = new TableRow(this.#pipeline, table);
    this.#rows.set(table.id, row);
    this.#byNode.set(row.node, row);
    this.#body.append(row.node);
    this.#watch.observe(row.node);
  }

  #drop(id) {
    const row = this.#rows.get(id);
    if (!row) return;
    this.#watch.unobserve(row.node);
    this.#byNode.delete(row.node);
    this.#rows.delete(id);
    row.node.remove();
  }

  #see(entries) {
    for (const { target, isIntersecting } of entries) this.#byNode.get(target)?.see(isIntersecting);
  }

  #arrange() {
    const wanted = this.search.value.trim().toLowerCase();
    const rows = [...this.#rows.values()];
    const counts = new Map(GROUPS.map((group) => [group, 0]));
    let shown = 0;
    for (const row of rows) {
      const { group } = row.table;
      counts.set(group, counts.get(group) + 1);
      const isShown = (this.#shown === "all" || group === this.#shown) && isFound(row.table, wanted);
      if (row.node.hidden === isShown) row.node.hidden = !isShown;
      shown += isShown;
    }
    this.#sort(rows);
    this.#showChips(counts, rows.length);
    this.#showCount(shown, rows.length, wanted);
  }

  #sort(rows) {
    // Rows do not move while one of them is pointed at or has the focus.
    if (this.#body.matches(":hover, :focus-within") && this.#body.children.length === rows.length && !this.#isReordered)
      return;
    this.#isReordered = false;
    rows.sort(comparison(this.#order));
    rows.forEach((row, place) => {
      row.place = place;
      if (this.#body.children[place] !== row.node)
        this.#body.insertBefore(row.node, this.#body.children[place] ?? null);
    });
  }
  #isReordered = true;

  #showChips(counts, all) {
    const chips = FILTERS.filter(([word]) => word === "all" || word === this.#shown || counts.get(word) > 0);
    refill(
      this.#chips,
      chips.map(([word, label]) =>
        element(
          "button",
          {
            type: "button",
            class: `chip ${word}`,
            "data-key": word,
            "aria-pressed": String(word === this.#shown),
            onclick: () => this.choose(word),
          },
          `${label} `,
          element("b", {}, String(word === "all" ? all : counts.get(word))),
        ),
      ),
    );
  }

  #showCount(shown, all, wanted) {
    this.#count.textContent = shown === all ? "changes: + inserted ~ updated − deleted" : `${shown} of ${all} tables`;
    this.#table.hidden = shown === 0;
    this.#empty.hidden = shown > 0;
    if (shown > 0) return;
    if (all === 0)
      refill(this.#empty, element("p", {}, "No table is known yet: they are found when the pipeline starts."));
    else {
      const which = wanted ? `matches “${visible(wanted)}”` : "is in this state now";
      const again = () => {
        this.search.value = "";
        this.choose("all");
        this.#arrange();
      };
      refill(
        this.#empty,
        element("p", {}, `No table ${which}.`),
        element("button", { type: "button", onclick: again }, "Show all tables"),
      );
    }
  }

  #head({ word, cell }) {
    const press = () => {
      const falls = this.#order.cell === cell ? !this.#order.falls : cell !== "name" && cell !== MATTERS_MOST;
      this.#order = { cell, falls };
      this.#isReordered = true;
      this.#showOrder();
      this.#arrange();
    };
    return element(
      "th",
      { role: "columnheader", scope: "col", class: cell },
      element("button", { type: "button", class: "sort", onclick: press }, word),
    );
  }

  #showOrder() {
    COLUMNS.forEach(({ cell }, index) => {
      const isOrder = cell === this.#order.cell;
      this.#heads[index].setAttribute("aria-sort", !isOrder ? "none" : this.#order.falls ? "descending" : "ascending");
    });
  }
}

function byPlace(one, other) {
  return one.place - other.place;
}

function isFound(table, wanted) {
  return !wanted || table.name.toLowerCase().includes(wanted) || wordOf(table).toLowerCase().includes(wanted);
}

function comparison({ cell, falls }) {
  const sign = falls ? -1 : 1;
  const by = COLUMNS.find((column) => column.cell === cell).by ?? ((table) => GROUPS.indexOf(table.group));
  return ({ table: one }, { table: other }) => sign * compare(by(one), by(other)) || compare(one.name, other.name);
}

function compare(one, other) {
  return one < other ? -1 : one > other ? 1 : 0;
}
