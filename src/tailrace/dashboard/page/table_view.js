// One table: why it stopped and what to do, what can be asked of it, what it did, and its columns over time.

import { actionButtons, actionCommands } from "./action.js";
import { get, placeOf } from "./api.js";
import { TimeChart } from "./chart.js";
import { element, refill } from "./element.js";
import { bytes, clock, count, duration, secondsUntil, short, visible, visibleLines } from "./format.js";
import { eventsBody, lettersBody, requestsBody } from "./happened.js";
import { fixBody } from "./health.js";
import { card } from "./overview.js";
import { addressOf } from "./route.js";
import { statePill } from "./table_row.js";

export class TableView {
  #pipeline;
  #table;
  #detail = null;
  #refresh;
  #hours;
  #head = element("div", { class: "title" });
  #error = element("section", { class: "card error", "aria-labelledby": "why", hidden: true });
  #buttons = element("div", { class: "buttons" });
  #figures = element("dl", { class: "figures" });
  #schemas = element("div");
  #requests = element("div");
  #events = element("div");
  #letters = element("section", { class: "card", "aria-labelledby": "letters", hidden: true });
  #chart = new TimeChart("Changes per hour", [
    { label: "inserted", color: "good", bar: true },
    { label: "updated", color: "brand", bar: true },
    { label: "deleted", color: "bad", bar: true },
  ]);

  /** `refresh` asks for a reading at once. */
  constructor(pipeline, table, refresh) {
    this.#pipeline = pipeline;
    this.#table = table;
    this.#refresh = refresh;
    this.#hours = card("hours", "Changes per hour", this.#chart.nodes);
    this.node = element(
      "div",
      { class: "view" },
      element(
        "nav",
        { class: "small", "aria-label": "Where this is" },
        element("a", { href: addressOf(pipeline) }, visible(pipeline)),
        element("span", { class: "soft" }, " / tables"),
      ),
      this.#head,
      element(
        "div",
        { class: "columns" },
        element(
          "div",
          { class: "stack" },
          this.#error,
          card("actions", "What you can do", this.#buttons),
          card("requests", "What was asked for", this.#requests),
          this.#letters,
          this.#hours,
        ),
        element(
          "div",
          { class: "stack side" },
          element("section", { class: "card", "aria-label": "Figures" }, this.#figures),
          card("schemas", "Columns over time", this.#schemas),
          card("events", "What happened", this.#events),
        ),
      ),
    );
  }

  async read(isCurrent) {
    const detail = await get(placeOf(this.#pipeline, "tables", this.#table));
    if (!isCurrent()) return;
    if (detail !== this.#detail) this.#show(detail);
    this.#showTimes();
  }

  close() {
    this.#chart.close();
  }

  #show(table) {
    this.#detail = table;
    refill(
      this.#head,
      element("h1", {}, element("bdi", {}, visible(table.name))),
      statePill(table),
      element(
        "span",
        { class: "soft small" },
        `since ${clock(table.since, { seconds: true })}${table.version === null ? "" : ` · schema v${table.version}`}`,
      ),
    );
    this.#showError(table.error);
    refill(this.#buttons, actionButtons(this.#pipeline, table, this.#refresh), actionCommands(table));
    this.#showFigures(table);
    refill(this.#schemas, versionsBody(table));
    refill(this.#requests, requestsBody(table.requests));
    refill(this.#events, eventsBody(table.events));
    this.#letters.hidden = table.letters.length === 0;
    const note = element("span", { class: "soft small" }, "values are never shown here");
    refill(
      this.#letters,
      element("header", {}, element("h2", { id: "letters" }, "Dead letters"), note),
      lettersBody(table.letters),
    );
    this.#showHours(table.hours);
  }

  #showError(error) {
    this.#error.hidden = error === null;
    if (error === null) return;
    refill(
      this.#error,
      element(
        "header",
        {},
        element("h2", { id: "why" }, "Why it stopped"),
        element("code", { class: "soft", title: error.docs }, error.code),
      ),
      element("p", { class: "reason" }, visibleLines(error.message ?? "No reason was recorded.")),
      fixBody(error.fix),
      element("p", { class: "small soft", id: "tries" }),
      element("p", { class: "small soft" }, "Explained in ", element("code", {}, error.docs), "."),
    );
  }

  /** What becomes another by itself between two answers. */
  #showTimes() {
    const error = this.#detail.error;
    if (error === null) return;
    const parts = [];
    if (error.attempts > 0) parts.push(`Tried ${error.attempts} of ${error.attempts_allowed} times.`);
    const left = error.next_try ? secondsUntil(error.next_try) : null;
    if (left !== null && left > 0)
      parts.push(`The next try is in ${duration(left)}, at ${clock(error.next_try, { seconds: true })}.`);
    else if (left !== null) parts.push("The next try is due now.");
    else if (error.retry_meaning) parts.push(error.retry_meaning);
    const kept = error.log_kept_until;
    if (kept)
      parts.push(
        secondsUntil(kept) > 0
          ? `Its log is kept until ${clock(kept)}; after that only a new copy helps.`
          : "Its log is not kept any more: it has to be copied again.",
      );
    const place = document.getElementById("tries") ?? this.#error.querySelector("#tries");
    const text = parts.join(" ");
    if (place.textContent !== text) place.textContent = text;
  }

  #showFigures(table) {
    const { rows_copied: copied, rows_total: total } = table;
    const figures = [
      [
        "Copied",
        table.state === "DataSync" && total ? `${short(copied)} of ~${short(total)}` : short(copied),
        count(copied),
      ],
      ["Rows/s", short(table.rows_per_second)],
      ["Inserted", short(table.inserts), count(table.inserts)],
      ["Updated", short(table.updates), count(table.updates)],
      ["Deleted", short(table.deletes), count(table.deletes)],
      ["Time left", table.seconds_left === null ? null : duration(table.seconds_left)],
      ["Lag", duration(table.lag_seconds)],
      ["Lag in bytes", bytes(table.lag_bytes)],
      ["Last applied", clock(table.last_applied_at, { seconds: true })],
    ].filter(([, value]) => value !== null);
    refill(
      this.#figures,
      figures.map(([name, value, whole]) =>
        element("div", {}, element("dt", {}, name), element("dd", { title: whole }, value)),
      ),
    );
  }

  #showHours(hours) {
    this.#hours.hidden = hours.length === 0;
    if (hours.length === 0) return;
    const at = hours.map(({ hour }) => Date.parse(hour) / 1000);
    this.#chart.show(
      at,
      ["inserts", "updates", "deletes"].map((kind) => hours.map((hour) => hour[kind])),
    );
  }
}

/** What each version of the columns changed, and the columns as they are now. */
function versionsBody({ versions, columns }) {
  if (versions.length === 0) return element("p", { class: "empty" }, "Its columns are not known yet.");
  const types = columns.map(({ name, type, upstream_type: upstream, key, nullable }) => [
    element("dt", {}, visible(name), key ? element("b", {}, " key") : null),
    element("dd", {}, element("code", {}, upstream ?? type), nullable ? "" : " not null"),
  ]);
  return [
    element(
      "ol",
      { class: "feed" },
      versions.map(({ version, position, changes }) =>
        element(
          "li",
          { "data-key": String(version) },
          element("b", { title: position }, `v${version}`),
          element("span", {}, visible(changes.join(", "))),
        ),
      ),
    ),
    element(
      "details",
      { "data-key": "columns" },
      element("summary", {}, `${columns.length} columns now`),
      element("dl", { class: "facts" }, types),
    ),
  ];
}
