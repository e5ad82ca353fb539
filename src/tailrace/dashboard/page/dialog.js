// The one dialog of the page: questions, and the list of keys.

import { element } from "./element.js";

/** Resolves to whether `yes` was pressed; Escape is a no. Without `yes` there is nothing to decide. */
export function askFirst({ title, body, yes = null, no }) {
  const dialog = document.getElementById("dialog");
  const before = document.activeElement;
  return new Promise((resolve) => {
    const end = (answer) => () => {
      dialog.returnValue = "";
      dialog.onclose = null;
      dialog.close();
      before?.focus?.();
      resolve(answer);
    };
    dialog.onclose = end(false);
    dialog.replaceChildren(
      element("h2", { id: "dialog-title" }, title),
      ...body,
      element(
        "div",
        { class: "buttons" },
        yes ? element("button", { type: "button", class: "main", onclick: end(true) }, yes) : null,
        element("button", { type: "button", onclick: end(false) }, no),
      ),
    );
    dialog.showModal();
  });
}
