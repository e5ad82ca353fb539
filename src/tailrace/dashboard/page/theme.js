// Light, dark or as the system has it; kept for the next visit.

import { icon } from "./element.js";

const KEY = "tailrace-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

let chosen = kept();

export function startTheme(button) {
  const show = () => {
    const theme = chosen === "system" ? (prefersDark.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.theme = theme;
    button.replaceChildren(icon(chosen));
    button.title = `Theme: ${chosen} (t)`;
    button.setAttribute("aria-label", `Theme: ${chosen}. Change to ${NEXT[chosen]}`);
    for (const listener of listeners) listener();
  };
  button.onclick = () => {
    chosen = NEXT[chosen];
    keep(chosen);
    show();
  };
  prefersDark.onchange = show;
  show();
}

/** Call `listener` whenever colours have changed; gives what ends that. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The value of a colour now, for what is drawn on a canvas. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function kept() {
  try {
    const theme = localStorage.getItem(KEY);
    return theme in NEXT ? theme : "system";
  } catch {
    return "system"; // A browser may forbid storage; the page works without.
  }
}

function keep(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // As above.
  }
}
