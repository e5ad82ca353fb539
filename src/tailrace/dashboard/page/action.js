// What can be asked of a table: each a request like that of the command line; those that cost ask first.

import { placeOf, post } from "./api.js";
import { command } from "./command.js";
import { askFirst } from "./dialog.js";
import { element } from "./element.js";
import { visible } from "./format.js";
import { say } from "./toast.js";

const ACTIONS = [
  { kind: "retry", label: "Retry now" },
  { kind: "skip", label: "Skip what stopped it" },
  { kind: "resync", label: "Copy again" },
  { kind: "pause", label: "Pause" },
  { kind: "resume", label: "Resume" },
];

/** Buttons for what can be done to the table now, the first of them the main one; `asked` is called after a request. */
export function actionButtons(pipeline, table, actions, asked) {
  const allowed = ACTIONS.filter(({ kind }) => actions[kind]?.allowed);
  return allowed.map(({ kind, label }, index) => {
    const action = actions[kind];
    const values = {
      type: "button",
      class: index === 0 && kind === "retry" ? "main" : "",
      title: action.command,
      "data-key": kind,
      onclick: () => perform(pipeline, table, { kind, label, ...action }, asked),
    };
    return element("button", values, label);
  });
}

async function perform(pipeline, table, action, asked) {
  if (action.cost && !(await confirmed(table, action))) return;
  try {
    await post(placeOf(pipeline, "tables", table, action.kind), {});
    say(`Asked for: ${action.label.toLowerCase()}, ${visible(table)}`);
  } catch (error) {
    say(error.fix ? `${error.message}: ${error.fix}` : error.message);
  }
  asked();
}

function confirmed(table, { label, cost, command: text }) {
  return askFirst({
    title: `${label}: ${visible(table)}?`,
    body: [element("p", {}, cost), element("p", { class: "soft small" }, "The same on the command line:"), command(text)],
    yes: label,
    no: "Not now",
  });
}
