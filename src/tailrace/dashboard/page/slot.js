// The replication slot: what the server keeps for it, and when that is too much.

import { element } from "./element.js";
import { bytes, clock, duration, lsn } from "./format.js";
import { fixBody } from "./health.js";

const SOON_SECONDS = 24 * 3600;

export function slotBody(slot, source) {
  const { kept_bytes: kept, limit_bytes: limit, growth, full_in: fullIn, full_at: fullAt } = slot;
  const facts = [
    ["State", slot.status],
    ["Grows by", growth === null ? null : growth > 0 ? `${bytes(growth)}/s` : "nothing"],
    ["Room left", slot.safe_bytes === null ? "no limit is set" : bytes(slot.safe_bytes)],
    ["Confirmed", slot.confirmed ? element("code", { title: slot.confirmed }, lsn(slot.confirmed)) : null],
    ["Needed from", slot.restart ? element("code", { title: slot.restart }, lsn(slot.restart)) : null],
    ["Journal", source?.journal_bytes ? bytes(source.journal_bytes) : null],
  ].filter(([, value]) => value !== null);
  return [
    element(
      "header",
      {},
      element("h2", { id: "slot" }, "Replication slot"),
      slot.name ? element("code", { class: "soft" }, slot.name) : null,
    ),
    limit === null ? null : gauge(kept, limit),
    element(
      "p",
      { class: "small" },
      element("b", {}, bytes(kept)),
      element("span", { class: "soft" }, limit === null ? " kept by the server" : ` kept of ${bytes(limit)} allowed`),
    ),
    fullIn === null
      ? null
      : element(
          "p",
          { class: fullIn < SOON_SECONDS ? "note" : "small" },
          element("b", {}, `Full in ${duration(fullIn)}`),
          `, at ${clock(fullAt)}, if it grows on like this.`,
        ),
    fixBody(slot.fix),
    element(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
    ),
  ];
}

function gauge(kept, limit) {
  const share = Math.min(1, kept / Math.max(limit, 1));
  const values = {
    class: share > 0.6 ? "gauge high" : "gauge",
    role: "meter",
    "aria-label": "Log kept for the slot",
    "aria-valuemin": 0,
    "aria-valuemax": 100,
    "aria-valuenow": Math.round(share * 100),
    "aria-valuetext": `${bytes(kept)} of ${bytes(limit)}`,
  };
  return element("div", values, element("i", { share }));
}
