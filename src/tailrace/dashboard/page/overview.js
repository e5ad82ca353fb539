// A pipeline as a whole.

import { placeOf, get } from "./api.js";
import { batchBody } from "./batch.js";
import { TimeChart } from "./chart.js";
import { element, refill } from "./element.js";
import { bytes, count, duration, visible } from "./format.js";
import { eventsBody, lettersBody, noticesBody, requestsBody } from "./happened.js";
import { healthBody, wayBody } from "./health.js";
import { addressOf } from "./route.js";
import { slotBody } from "./slot.js";
import { TableList } from "./table_list.js";

const LAGS = {
  seconds: { word: "Seconds", value: "lag_seconds", format: duration },
  bytes: { word: "Bytes", value: "lag_bytes", format: bytes },
};

export class Overview {
  #pipeline;
  #version = null;
  #shownSeries = null;
  #lag = "seconds";
  #health = element("section", { class: "health", "aria-label": "Health" });
  #way = element("ol", { class: "card way", "aria-label": "The way of a change" });
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
  #lags = new TimeChart("Lag", [{ label: "lag", color: "brand" }], { format: (value) => LAGS[this.#lag].format(value) });
  #lagSwitch = element("div", { class: "switch", role: "group", "aria-label": "Lag in" });
  #charts;

  constructor(pipeline) {
    this.#pipeline = pipeline;
    this.tables = new TableList(pipeline, (filter) => location.replace(addressOf(pipeline, null, filter === "all" ? null : filter)));
    this.#charts = element(
      "div",
      { class: "charts" },
      card("rates", "Rows per second", this.#rates.nodes),
      card("lags", "Lag", this.#lags.nodes, this.#lagSwitch),
    );
    this.node = element(
      "div",
      { class: "view" },
      this.#health,
      this.#way,
      this.#charts,
      element(
        "div",
        { class: "columns" },
        element("div", { class: "stack" }, this.tables.node, this.#letters, card("events", "What happened", this.#events)),
        element("div", { class: "stack side" }, this.#slot, this.#batches, card("requests", "What was asked for", this.#requests), this.#notices),
      ),
    );
    this.#showLagSwitch();
  }

  /** Read what has changed since the last time and show it. */
  async read(isCurrent) {
    const detail = await get(placeOf(this.#pipeline));
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
    this.#health.className = `health ${detail.health.level}`;
    refill(this.#health, healthBody(this.#pipeline, detail.health));
    refill(this.#way, wayBody(detail.way));
    this.#way.hidden = detail.way.length === 0;
    this.#slot.hidden = detail.slot === null;
    if (detail.slot) refill(this.#slot, slotBody(detail.slot, detail.source));
    refill(this.#batches, batchBody(detail.batches));
    refill(this.#events, eventsBody(detail.events, this.#pipeline));
    refill(this.#requests, requestsBody(detail.requests, this.#pipeline));
    this.#showNotices(detail.notices);
    this.#showLetters(detail.dead_letters);
    this.#showSeries();
  }
  #detail = null;

  #showNotices(notices) {
    this.#notices.hidden = notices.length === 0;
    refill(this.#notices, element("header", {}, element("h2", { id: "notices" }, "Left out")), noticesBody(notices));
  }

  #showLetters({ waiting, letters }) {
    this.#letters.hidden = letters.length === 0;
    const note = element("span", { class: "soft small" }, `${count(waiting)} wait · their values are never shown here`);
    refill(this.#letters, element("header", {}, element("h2", { id: "letters" }, "Dead letters"), note), lettersBody(letters, this.#pipeline));
  }

  #showSeries() {
    const { series, events } = this.#detail;
    this.#charts.hidden = series.at.length < 2;
    if (series.at.length < 2) return;
    const stops = events.filter(({ kind, table }) => kind === "stopped" && table).map(({ at, table }) => ({ at: Date.parse(at) / 1000, text: `${visible(table)} stops` }));
    this.#rates.show(series.at, [series.changes, series.copied], stops.slice(0, 3));
    this.#lags.show(series.at, [series[LAGS[this.#lag].value]]);
  }

  #showLagSwitch() {
    const choose = (lag) => () => {
      this.#lag = lag;
      this.#showLagSwitch();
      this.#showSeries();
    };
    refill(
      this.#lagSwitch,
      Object.entries(LAGS).map(([lag, { word }]) => element("button", { type: "button", "aria-pressed": String(lag === this.#lag), onclick: choose(lag) }, word)),
    );
  }
}

export function card(id, title, content, aside = null) {
  return element("section", { class: "card", "aria-labelledby": id }, element("header", {}, element("h2", { id }, title), aside), content);
}
