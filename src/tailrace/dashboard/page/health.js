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

/** A fix: its commands to copy, and those of its lines that are more than a command. */
export function fixBody(fix) {
  if (!fix) return null;
  const { text, commands } = fix;
  const known = new Set(commands.map(withoutEnd));
  const words = text.split("\n").filter((line) => line.trim() && !known.has(withoutEnd(line)));
  return element(
    "div",
    { class: "fix" },
    words.map((line) => element("p", { class: "small" }, withCode(line))),
    commands.map(command),
  );
}

function withoutEnd(line) {
  return line.trim().replace(/;$/, "");
}

/** Text in which what stands between backticks is code. */
function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, visible(part)) : visible(part)));
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
