// The replication slot: what the server keeps for it, and when that is too much.

import { command } from "./command.js";
import { element } from "./element.js";
import { bytes, duration } from "./format.js";

const SOON_SECONDS = 24 * 3600;

export function slotBody(slot, source) {
  const { kept_bytes: kept, safe_bytes: safe, growth, full_in: fullIn } = slot;
  const limit = kept !== null && safe !== null ? kept + Math.max(0, safe) : null;
  const facts = [
    ["State", slot.status],
    ["Grows by", growth === null ? null : growth > 0 ? `${bytes(growth)}/s` : "nothing"],
    ["Full in", fullIn === null ? null : duration(fullIn)],
    ["Confirmed", slot.confirmed ? element("code", {}, slot.confirmed) : null],
    ["Needed from", slot.restart ? element("code", {}, slot.restart) : null],
    ["Journal", source?.journal_bytes ? bytes(source.journal_bytes) : null],
  ].filter(([, value]) => value !== null && value !== undefined);
  return [
    element("header", {}, element("h2", { id: "slot" }, "Replication slot"), slot.name ? element("code", { class: "soft" }, slot.name) : null),
    limit === null ? null : gauge(kept, limit),
    element("p", { class: "small" }, element("b", {}, bytes(kept)), element("span", { class: "soft" }, limit === null ? " kept, without a limit" : ` kept of ${bytes(limit)} allowed`)),
    slot.sentence ? element("p", { class: fullIn !== null && fullIn < SOON_SECONDS ? "note" : "small" }, slot.sentence) : null,
    slot.fix ? command(slot.fix) : null,
    element("dl", { class: "facts" }, facts.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
  ];
}

function gauge(kept, limit) {
  const share = Math.min(1, kept / limit);
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
