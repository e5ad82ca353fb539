// A pipeline as a whole.

import { get, placeOf } from "./api.js";
import { batchBody } from "./batch.js";
import { TimeChart } from "./chart.js";
import { element, refill } from "./element.js";
import { bytes, duration, shortened } from "./format.js";
import { alertsBody, eventsBody, lettersBody, noticesBody, requestsBody } from "./happened.js";
import { healthBody, wayBody } from "./health.js";
import { addressOf } from "./route.js";
import { slotBody } from "./slot.js";
import { TableList } from "./table_list.js";

const LAGS = {
  seconds: { word: "Seconds", value: "lag_seconds", format: duration },
  bytes: { word: "Bytes", value: "lag_bytes", format: bytes },
};

const HOURS = [1, 6, 24];
const MARKS = 3;

export class Overview {
  #pipeline;
  #detail = null;
  #version = null;
  #hours = 1;
  #lag = "seconds";
  #health = element("section", { class: "health", "aria-label": "Health" });
  #way = element("ol", { class: "card way", "aria-label": "The way of a change" });
  #alerts = element("section", { class: "card", "aria-labelledby": "alerts", hidden: true });
  #notices = element("section", { class: "card", "aria-labelledby": "notices", hidden: true });
  #slot = element("section", { class: "card stack", "aria-labelledby": "slot" });
  #batches = element("section", { class: "card", "aria-labelledby": "batches" });
  #letters = element("section", { class: "card", "aria-labelledby": "letters", hidden: true });
  #events = element("div");
  #requests = element("div");
  #rates = new TimeChart("Rows per second", [
    { label: "changes", color: "brand" },
    { label: "copied", color: "copy", dash: true },
  ]);
  #lags = new TimeChart("Lag", [{ label: "lag", color: "brand" }], {
    format: (value) => LAGS[this.#lag].format(value),
  });
  #lagSwitch = element("div", { class: "switch", role: "group", "aria-label": "Lag in" });
  #hourSwitch = element("div", { class: "switch", role: "group", "aria-label": "Time that is shown" });
  #charts;
  #rest;
  #refresh;

  /** `refresh` asks for a reading at once. */
  constructor(pipeline, refresh) {
    this.#pipeline = pipeline;
    this.#refresh = refresh;
    this.tables = new TableList(pipeline, (filter) =>
      location.replace(addressOf(pipeline, null, filter === "all" ? null : filter)),
    );
    this.#charts = element(
      "div",
      { class: "charts" },
      card("rates", "Rows per second", this.#rates.nodes, this.#hourSwitch),
      card("lags", "Lag", this.#lags.nodes, this.#lagSwitch),
    );
    this.#rest = element(
      "div",
      { class: "view" },
      this.#way,
      this.#charts,
      element(
        "div",
        { class: "columns" },
        element(
          "div",
          { class: "stack" },
          this.tables.node,
          this.#letters,
          card("events", "What happened", this.#events),
          card("requests", "What was asked for", this.#requests),
        ),
        element("div", { class: "stack side" }, this.#alerts, this.#slot, this.#batches, this.#notices),
      ),
    );
    this.node = element("div", { class: "view" }, this.#health, this.#rest);
    this.#showSwitches();
  }

  /** Read what has changed since the last time and show it; `summary` is what the list of pipelines has of it. */
  async read(isCurrent, summary) {
    this.#showHealth(summary);
    // Of a state that cannot be read there is nothing more to show; the sentence says why.
    this.#rest.hidden = summary.health.level === "unknown";
    if (this.#rest.hidden) return;
    const detail = await get(`${placeOf(this.#pipeline)}?hours=${this.#hours}`);
    if (!isCurrent()) return;
    this.#show(detail);
    const since = this.#version === null ? "" : `?since=${encodeURIComponent(this.#version)}`;
    const tables = await get(`${placeOf(this.#pipeline, "tables")}${since}`);
    if (!isCurrent() || tables.version === this.#version) return;
    this.#version = tables.version;
    this.tables.update(tables);
  }

  close() {
    this.#rates.close();
    this.#lags.close();
    this.tables.close();
  }

  #show(detail) {
    if (detail === this.#detail) return;
    this.#detail = detail;
    refill(this.#way, wayBody(detail.way));
    this.#way.hidden = detail.way.length === 0;
    this.#slot.hidden = detail.slot === null;
    if (detail.slot) refill(this.#slot, slotBody(detail.slot, detail.source));
    refill(this.#batches, batchBody(detail.batches));
    refill(this.#events, eventsBody(detail.events, this.#pipeline));
    refill(this.#requests, requestsBody(detail.requests, this.#pipeline));
    this.#showAlerts(detail.alerts.filter((alert) => alert.told_at || alert.failure));
    this.#showNotices(detail.notices);
    this.#showLetters(detail.letters);
    this.#showSeries();
  }

  #showHealth(summary) {
    this.#health.className = `health ${summary.health.level}`;
    refill(this.#health, healthBody(summary));
  }

  #showAlerts(alerts) {
    this.#alerts.hidden = alerts.length === 0;
    refill(this.#alerts, element("header", {}, element("h2", { id: "alerts" }, "Alerts")), alertsBody(alerts));
  }

  #showNotices(notices) {
    this.#notices.hidden = notices.length === 0;
    refill(this.#notices, element("header", {}, element("h2", { id: "notices" }, "Left out")), noticesBody(notices));
  }

  #showLetters(letters) {
    this.#letters.hidden = letters.length === 0;
    const note = element("span", { class: "soft small" }, "the newest; values are never shown here");
    refill(
      this.#letters,
      element("header", {}, element("h2", { id: "letters" }, "Dead letters"), note),
      lettersBody(letters, this.#pipeline),
    );
  }

  #showSeries() {
    const { series, events } = this.#detail;
    this.#charts.hidden = series.at.length < 2;
    if (series.at.length < 2) return;
    const stops = events.filter(({ kind, table }) => kind === "error" && table).slice(0, MARKS);
    const marks = stops.map(({ at, table }) => ({ at: Date.parse(at) / 1000, text: `${shortened(table)} stops` }));
    this.#rates.show(series.at, [series.changes_per_second, series.copied_per_second], marks);
    this.#lags.show(series.at, [series[LAGS[this.#lag].value]]);
  }

  #showSwitches() {
    const choices = (entries, now, choose) =>
      entries.map(([value, word]) =>
        element(
          "button",
          { type: "button", "aria-pressed": String(value === now), onclick: () => choose(value) },
          word,
        ),
      );
    const chooseLag = (lag) => {
      this.#lag = lag;
      this.#showSwitches();
      this.#showSeries();
    };
    const chooseHours = (hours) => {
      this.#hours = hours;
      this.#showSwitches();
      this.#refresh();
    };
    refill(
      this.#lagSwitch,
      choices(
        Object.entries(LAGS).map(([lag, { word }]) => [lag, word]),
        this.#lag,
        chooseLag,
      ),
    );
    refill(
      this.#hourSwitch,
      choices(
        HOURS.map((hours) => [hours, `${hours} h`]),
        this.#hours,
        chooseHours,
      ),
    );
  }
}

export function card(id, title, content, aside = null) {
  return element(
    "section",
    { class: "card", "aria-labelledby": id },
    element("header", {}, element("h2", { id }, title), aside),
    content,
  );
}
