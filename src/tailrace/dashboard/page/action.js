// What can be asked of a table: each a request like that of the command line; those that cost ask first.

import { placeOf, post } from "./api.js";
import { command } from "./command.js";
import { askFirst } from "./dialog.js";
import { element } from "./element.js";
import { count, visible } from "./format.js";
import { say } from "./toast.js";

const LABELS = {
  retry: "Retry now",
  skip: "Skip what stopped it",
  resync: "Copy again",
  pause: "Pause",
  resume: "Resume",
};

/** What has to be known before it is done: what the upstream or the destination pays for it. */
const COSTS = {
  resync: ({ rows_copied: rows }) =>
    `Every row is read from the upstream again${rows ? `, ${count(rows)} the last time` : ""}. ` +
    "Readers see the old rows until the new copy is complete.",
  skip: () =>
    "The table goes on without the changes that stopped it, and lacks them until it is copied again. " +
    "They are kept as dead letters.",
};

/** Buttons for what can be done to the table now; `asked` is called after a request was left. What was asked for and
 *  is not done yet cannot be asked for again, and keeps its button, with the focus. */
export function actionButtons(pipeline, table, asked) {
  const actions = Object.keys(LABELS).map((kind) => table.actions.find(({ action }) => action === kind));
  return actions
    .filter((action) => action?.possible)
    .map((action) => {
      const kind = action.action;
      const values = {
        type: "button",
        class: kind === "retry" || kind === "resume" ? "main" : null,
        title: action.command,
        "data-key": kind,
        "aria-disabled": action.asked ? "true" : null,
        onclick: action.asked ? null : () => perform(pipeline, table, action, asked),
      };
      return element("button", values, action.asked ? `${LABELS[kind]}: asked` : LABELS[kind]);
    });
}

/** The commands that do the same. */
export function actionCommands(table) {
  const possible = table.actions.filter((action) => action.possible);
  if (possible.length === 0) return null;
  return element(
    "details",
    { "data-key": "commands" },
    element("summary", {}, "The same on the command line"),
    possible.map((action) => command(action.command)),
  );
}

async function perform(pipeline, table, action, asked) {
  const cost = COSTS[action.action]?.(table);
  if (cost && !(await isConfirmed(table, action, cost))) return;
  try {
    const { text } = await post(placeOf(pipeline, "tables", table.name, action.action), {});
    say(visible(text));
  } catch (error) {
    say(error.fix ? `${error.message}: ${error.fix}` : error.message);
  }
  asked();
}

function isConfirmed(table, action, cost) {
  return askFirst({
    title: `${LABELS[action.action]}: ${visible(table.name)}?`,
    body: [
      element("p", {}, cost),
      element("p", { class: "soft small" }, "The same on the command line:"),
      command(action.command),
    ],
    yes: LABELS[action.action],
    no: "Not now",
  });
}
