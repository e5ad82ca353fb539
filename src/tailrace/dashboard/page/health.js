// Whether all is well, in a sentence, and the way of a change with the stage that holds the others up.

import { command } from "./command.js";
import { element, icon } from "./element.js";
import { visible } from "./format.js";
import { addressOf } from "./route.js";

const ICONS = { healthy: "following", degraded: "errored", failing: "errored", stopped: "paused", unknown: "unknown" };

/** The sentence, with what to do: one table that stopped is opened, of several the list is, else the fix is shown. */
export function healthBody({ name, health, tables }) {
  const { level, sentence, detail, table, fix } = health;
  let next = null;
  if (table && tables.errored === 1) next = mainLink(addressOf(name, table), "See what to do");
  else if (tables.errored > 1) next = mainLink(addressOf(name, null, "errored"), `See all ${tables.errored}`);
  return [
    icon(ICONS[level]),
    element(
      "div",
      { class: "grow" },
      element("h1", { "aria-live": "polite" }, visible(sentence)),
      detail ? element("p", { class: "small" }, visible(detail)) : null,
      next === null ? fixBody(fix) : null,
    ),
    next,
  ];
}

/** A fix: its commands to copy, or the words where nothing in it can be run. */
export function fixBody(fix) {
  if (!fix) return null;
  const { text, commands } = fix;
  const isAllCommands = commands.length > 0 && withoutEnds(commands.join("\n")) === withoutEnds(text);
  return element(
    "div",
    { class: "fix" },
    isAllCommands ? null : element("p", { class: "small" }, withCode(text)),
    commands.map(command),
  );
}

/** Text in which what stands between backticks is code. */
function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, visible(part)) : visible(part)));
}

function withoutEnds(text) {
  return text.replace(/;?\s+|;$/g, " ").trim();
}

function mainLink(href, text) {
  return element("a", { class: "button main", href }, text);
}

export function wayBody(stages) {
  return stages.map(({ stage, title, value, detail, slow, why }) =>
    element(
      "li",
      { class: slow ? "slow" : null, "data-key": stage },
      element("p", { class: "label" }, title, slow ? element("span", { class: "unseen" }, ", slow") : null),
      element("p", { class: "value" }, visible(value)),
      element("p", { class: "detail" }, visible(why ?? detail)),
    ),
  );
}
