// Whether all is well, in a sentence, and the way of a change with the stage that holds the others up.

import { command } from "./command.js";
import { element, icon } from "./element.js";
import { visible } from "./format.js";
import { addressOf } from "./route.js";

const ICONS = { ok: "following", busy: "copying", "needs-you": "stopped", stopped: "paused", "never-run": "waiting" };

export function healthBody(pipeline, health) {
  const { level, sentence, detail, fix, tables } = health;
  const [first] = tables;
  let next = null;
  if (health.count === 1) next = element("a", { class: "button main", href: addressOf(pipeline, first) }, "See what to do");
  else if (health.count > 1) next = element("a", { class: "button main", href: addressOf(pipeline, null, "stopped") }, `See all ${health.count}`);
  return [
    icon(ICONS[level] ?? "waiting"),
    element(
      "div",
      { class: "grow" },
      element("h1", { "aria-live": "polite" }, visible(sentence)),
      detail ? element("p", { class: "soft small" }, visible(detail)) : null,
      fix ? command(fix) : null,
    ),
    next,
  ];
}

export function wayBody(stages) {
  return stages.map(({ stage, label, value, detail, slow }) =>
    element(
      "li",
      { class: slow ? "slow" : "", "data-key": stage },
      element("p", { class: "label" }, label, slow ? element("span", { class: "unseen" }, ", the slowest stage now") : null),
      element("p", { class: "value" }, value),
      element("p", { class: "detail" }, detail ?? ""),
    ),
  );
}
