// What happened, what was asked for and what became of it, what the run left out, and which changes wait.

import { command } from "./command.js";
import { element } from "./element.js";
import { clock, count, visible } from "./format.js";
import { addressOf } from "./route.js";

/** Events, newest first; `pipeline` makes names of tables links, null leaves them out. */
export function eventsBody(events, pipeline) {
  if (events.length === 0) return element("p", { class: "empty" }, "Nothing yet.");
  return element(
    "ol",
    { class: "feed" },
    events.map(({ at, table, text, kind }) =>
      element(
        "li",
        { class: kind ?? "", "data-key": `${at} ${table} ${text}` },
        element("time", { datetime: at, title: clock(at, { seconds: true }) }, clock(at)),
        element("span", {}, table && pipeline ? [element("a", { href: addressOf(pipeline, table) }, visible(table)), " "] : null, visible(text)),
      ),
    ),
  );
}

const ASKED = { resync: "copy again", pause: "pause", resume: "resume", retry: "retry", skip: "skip" };

export function requestsBody(requests, pipeline = null) {
  if (requests.length === 0) return element("p", { class: "empty" }, "Nothing was asked for.");
  return element(
    "ol",
    { class: "feed requests" },
    requests.map(({ id, kind, table, at, done_at: doneAt, outcome }) =>
      element(
        "li",
        { "data-key": String(id) },
        element("time", { datetime: at, title: clock(at, { seconds: true }) }, clock(at)),
        element(
          "span",
          {},
          element("b", {}, ASKED[kind] ?? kind),
          pipeline ? [" ", element("a", { href: addressOf(pipeline, table) }, visible(table))] : null,
          doneAt ? `: ${visible(outcome ?? "done")} (${clock(doneAt, { seconds: true })})` : element("em", {}, ": not done yet"),
        ),
      ),
    ),
  );
}

export function noticesBody(notices) {
  return element(
    "ul",
    { class: "notices" },
    notices.map(({ subject, message, fix }) =>
      element("li", { "data-key": `${subject} ${message}` }, element("p", {}, element("b", {}, visible(subject)), ` ${visible(message)}`), fix ? command(fix) : null),
    ),
  );
}

/** Changes that could not be applied: what and where, never their values. */
export function lettersBody(letters, pipeline = null) {
  const columns = ["Letter", ...(pipeline ? ["Table"] : []), "Change", "Position", "Why", "Tries", "Last try"];
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": "Dead letters" },
    element(
      "table",
      { class: "plain" },
      element("thead", {}, element("tr", {}, columns.map((word) => element("th", { scope: "col" }, word)))),
      element(
        "tbody",
        {},
        letters.map((letter) =>
          element(
            "tr",
            { "data-key": String(letter.id) },
            element("td", {}, String(letter.id)),
            pipeline ? element("td", {}, element("a", { href: addressOf(pipeline, letter.table) }, visible(letter.table))) : null,
            element("td", {}, letter.version === null ? letter.kind : `${letter.kind}, v${letter.version}`),
            element("td", {}, element("code", {}, letter.position)),
            element("td", { class: "long" }, visible(letter.reason)),
            element("td", {}, count(letter.tries)),
            element("td", {}, clock(letter.last_at, { seconds: true })),
          ),
        ),
      ),
    ),
  );
}
