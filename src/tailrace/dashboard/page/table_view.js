// One table: why it stopped and what to do, what can be asked of it, what it did, and its columns over time.

import { actionButtons } from "./action.js";
import { get, placeOf } from "./api.js";
import { TimeChart } from "./chart.js";
import { command } from "./command.js";
import { element, refill } from "./element.js";
import { bytes, clock, count, duration, secondsUntil, short, visible } from "./format.js";
import { eventsBody, lettersBody, requestsBody } from "./happened.js";
import { card } from "./overview.js";
import { addressOf } from "./route.js";
import { statePill } from "./table_row.js";

export class TableView {
  #pipeline;
  #table;
  #detail = null;
  #refresh;
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
    this.#chartCard = card("hours", "Changes per hour", this.#chart.nodes);
    this.node = element(
      "div",
      { class: "view" },
      element("nav", { class: "small", "aria-label": "Where this is" }, element("a", { href: addressOf(pipeline) }, visible(pipeline)), element("span", { class: "soft" }, " / tables")),
      this.#head,
      element(
        "div",
        { class: "columns" },
        element(
          "div",
          { class: "stack" },
          this.#error,
          card("actions", "What you can do", this.#buttons),
          this.#letters,
          this.#chartCard,
          card("requests", "What was asked for", this.#requests),
        ),
        element("div", { class: "stack side" }, element("section", { class: "card", "aria-label": "Figures" }, this.#figures), card("schemas", "Columns over time", this.#schemas), card("events", "What happened", this.#events)),
      ),
    );
  }
  #chartCard;

  async read(isCurrent) {
    const detail = await get(placeOf(this.#pipeline, "tables", this.#table));
    if (!isCurrent()) return;
    if (detail !== this.#detail) this.#show(detail);
    this.#showTimes();
  }

  close() {
    this.#chart.close();
  }

  #show(detail) {
    this.#detail = detail;
    const { row } = detail;
    refill(
      this.#head,
      element("h1", {}, element("bdi", {}, visible(row.name))),
      statePill(row),
      element("span", { class: "soft small" }, `since ${clock(row.since, { seconds: true })}${row.version === null ? "" : ` · schema v${row.version}`}`),
    );
    this.#showError(detail);
    refill(this.#buttons, actionButtons(this.#pipeline, this.#table, detail.actions, this.#refresh), sameCommand(detail.actions));
    this.#showFigures(row);
    refill(this.#schemas, schemasBody(detail.schemas));
    refill(this.#requests, requestsBody(detail.requests));
    refill(this.#events, eventsBody(detail.events, null));
    this.#letters.hidden = detail.letters.length === 0;
    const note = element("span", { class: "soft small" }, "values are never shown here");
    refill(this.#letters, element("header", {}, element("h2", { id: "letters" }, "Changes that wait"), note), lettersBody(detail.letters));
    this.#showHours(detail.hours);
  }

  #showError({ row, code, docs, steps, log_kept: logKept }) {
    this.#error.hidden = !row.reason;
    if (!row.reason) return;
    refill(
      this.#error,
      element("header", {}, element("h2", { id: "why" }, "Why it stopped"), code ? element("code", { class: "code" }, code) : null),
      element("p", { class: "reason" }, visible(row.reason)),
      steps.length > 0 ? element("ol", { class: "steps" }, steps.map(({ text, command: line }) => element("li", {}, element("div", {}, text ? element("p", {}, visible(text)) : null, line ? command(line) : null)))) : null,
      element("p", { class: "small soft", id: "tries" }),
      logKept ? element("p", { class: "small soft" }, logKept) : null,
      docs ? element("p", { class: "small soft" }, "Explained in ", element("code", {}, docs)) : null,
    );
  }

  /** What grows by itself between two answers. */
  #showTimes() {
    const place = document.getElementById("tries");
    if (!place) return;
    const { attempts, next_try: next, retry } = this.#detail.row;
    const tried = attempts > 0 ? `Tried ${attempts} ${attempts === 1 ? "time" : "times"}. ` : "";
    const left = next ? secondsUntil(next) : null;
    const when =
      left !== null
        ? `The next try is ${left > 0 ? `in ${duration(left)}, at ${clock(next, { seconds: true })}` : "due now"}.`
        : { manual: "It is not tried again before you ask for it.", none: "A retry cannot help: it has to be copied again." }[retry] ?? "";
    const text = tried + when;
    if (place.textContent !== text) place.textContent = text;
  }

  #showFigures(row) {
    const figures = [
      ["Copied", row.rows_total && row.state === "DataSync" ? `${short(row.rows_copied)} of ~${short(row.rows_total)}` : short(row.rows_copied), count(row.rows_copied)],
      ["Rows/s", short(row.rows_per_second)],
      ["Inserted", short(row.inserts), count(row.inserts)],
      ["Updated", short(row.updates), count(row.updates)],
      ["Deleted", short(row.deletes), count(row.deletes)],
      ["Lag", duration(row.lag_seconds)],
      ["Behind", bytes(row.lag_bytes)],
      ["Last change applied", clock(row.last_applied_at, { seconds: true })],
    ];
    refill(this.#figures, figures.map(([name, value, whole]) => element("div", {}, element("dt", {}, name), element("dd", { title: whole ?? null }, value))));
  }

  #showHours(hours) {
    this.#chartCard.hidden = hours.length === 0;
    if (hours.length === 0) return;
    const at = hours.map(({ hour }) => Date.parse(hour) / 1000);
    this.#chart.show(at, ["inserts", "updates", "deletes"].map((kind) => hours.map((hour) => hour[kind])));
  }
}

function sameCommand(actions) {
  const lines = Object.values(actions).filter((action) => action.allowed);
  if (lines.length === 0) return null;
  return element(
    "details",
    { "data-key": "commands" },
    element("summary", {}, "The same on the command line"),
    lines.map((action) => command(action.command)),
  );
}

function schemasBody(schemas) {
  if (schemas.length === 0) return element("p", { class: "empty" }, "Its columns are not known yet.");
  return element(
    "ol",
    { class: "schemas" },
    schemas.map(({ version, at, columns, changes }, index) =>
      element(
        "li",
        { "data-key": String(version) },
        element(
          "details",
          { open: index === 0 && schemas.length === 1 },
          element("summary", {}, element("b", {}, `v${version}`), ` ${changes.length > 0 ? changes.map(visible).join(", ") : `${columns.length} columns`}`, at ? element("span", { class: "soft" }, ` · ${clock(at)}`) : null),
          element("dl", { class: "facts" }, columns.map(({ name, type, key }) => [element("dt", {}, visible(name)), element("dd", {}, element("code", {}, type), key ? " key" : null)])),
        ),
      ),
    ),
  );
}
