// What happened, what was asked for and what became of it, what the run left out, and which changes wait.

import { element } from "./element.js";
import { clock, count, visible } from "./format.js";
import { fixBody } from "./health.js";
import { addressOf } from "./route.js";

const SHOWN = 8;

/** Events, newest first. Those of a table lead to it where a pipeline is given. */
export function eventsBody(events, pipeline = null) {
  if (events.length === 0) return element("p", { class: "empty" }, "Nothing yet.");
  const entries = events.map((event) => eventEntry(event, pipeline));
  return withRest(entries, "feed");
}

function eventEntry({ at, table, text, kind }, pipeline) {
  return element(
    "li",
    { class: kind, "data-key": `${at} ${text}` },
    element("time", { datetime: at, title: clock(at, { seconds: true }) }, clock(at)),
    table && pipeline
      ? element("a", { href: addressOf(pipeline, table) }, visible(text))
      : element("span", {}, visible(text)),
  );
}

/** The first entries of a list; the rest is there once its number is pressed. */
function withRest(entries, name) {
  const rest = entries.slice(SHOWN);
  return [
    element("ol", { class: name }, entries.slice(0, SHOWN)),
    rest.length > 0
      ? element(
          "details",
          { class: "rest" },
          element("summary", {}, `${rest.length} more`),
          element("ol", { class: name }, rest),
        )
      : null,
  ];
}

const ASKED = { resync: "copy again", pause: "pause", resume: "resume", retry: "retry", skip: "skip" };

export function requestsBody(requests, pipeline = null) {
  if (requests.length === 0) return element("p", { class: "empty" }, "Nothing was asked for.");
  return withRest(
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
          doneAt
            ? `: ${visible(outcome ?? "done")} (${clock(doneAt, { seconds: true })})`
            : element("em", {}, ": not done yet"),
        ),
      ),
    ),
    "feed",
  );
}

export function noticesBody(notices) {
  return element(
    "ul",
    { class: "notices" },
    notices.map(({ subject, message, fix }) =>
      element(
        "li",
        { "data-key": `${subject} ${message}` },
        element("p", {}, element("b", {}, visible(subject)), ` ${visible(message)}`),
        fixBody(fix),
      ),
    ),
  );
}

/** What people were told and what they could not be told. */
export function alertsBody(alerts) {
  return element(
    "ul",
    { class: "notices" },
    alerts.map(({ name, since, told_at: toldAt, text, failure }) =>
      element(
        "li",
        { "data-key": name },
        element("p", {}, element("b", {}, visible(text ?? name))),
        element(
          "p",
          { class: "soft small" },
          toldAt ? `since ${clock(since)}, told at ${clock(toldAt)}` : `since ${clock(since)}`,
        ),
        failure ? element("p", {}, `It could not be sent: ${visible(failure)}`) : null,
      ),
    ),
  );
}

/** The commit of a position without the zeros before it; the whole of it is in the title. */
function shortPosition(position) {
  return position.slice(0, 16).replace(/^0+(?=.)/, "");
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
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          columns.map((word) => element("th", { scope: "col" }, word)),
        ),
      ),
      element(
        "tbody",
        {},
        letters.map((letter) =>
          element(
            "tr",
            { "data-key": String(letter.id) },
            element("td", {}, String(letter.id)),
            pipeline
              ? element("td", {}, element("a", { href: addressOf(pipeline, letter.table) }, visible(letter.table)))
              : null,
            element("td", {}, letter.version === null ? letter.kind : `${letter.kind}, v${letter.version}`),
            element("td", {}, element("code", { title: letter.position }, shortPosition(letter.position))),
            element("td", { class: "long" }, visible(letter.reason)),
            element("td", {}, count(letter.tries)),
            element("td", {}, clock(letter.last_at, { seconds: true })),
          ),
        ),
      ),
    ),
  );
}
