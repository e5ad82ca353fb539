// A command with a button that copies it.

import { element } from "./element.js";
import { say } from "./toast.js";

export function command(text) {
  const code = element("code", {}, text);
  const button = {
    type: "button",
    "aria-label": `Copy: ${text}`,
    onclick: (event) => copy(event.currentTarget.previousElementSibling),
  };
  return element("div", { class: "command", "data-key": text }, code, element("button", button, "Copy"));
}

async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    say("Copied");
  } catch {
    // Browsers give the clipboard only to pages of this machine or of https: the text is selected for the keyboard.
    getSelection().selectAllChildren(code);
    say("Selected: copy it with Ctrl-C");
  }
}
