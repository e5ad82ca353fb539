// What single keys do, wherever no text is being typed.

export const KEYS = [
  ["/", "find a table"],
  ["j", "next table"],
  ["k", "previous table"],
  ["Enter", "open the table"],
  ["Esc", "back to all tables, or out of the search"],
  ["t", "theme: system, light, dark"],
  ["?", "this list"],
];

/** Call `actions[key]` when the key is pressed alone. Keys in fields belong to these, but for Escape. */
export function startKeyboard(actions) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (document.querySelector("dialog[open]")) return;
    const isTyping = event.target instanceof Element && event.target.matches("input, textarea, select");
    if (isTyping && event.key !== "Escape") return;
    const action = actions[event.key];
    if (action) {
      event.preventDefault();
      action(event);
    }
  });
}
