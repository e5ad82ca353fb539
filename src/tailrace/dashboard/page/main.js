// The page: which view is shown, what is read for it, and whether the server answers.

import { ApiError, Poll, forgetAnswers, get } from "./api.js";
import { askFirst } from "./dialog.js";
import { element, refill } from "./element.js";
import { clock, visible } from "./format.js";
import { KEYS, startKeyboard } from "./keyboard.js";
import { logInByAddress, loginForm } from "./login.js";
import { Overview } from "./overview.js";
import { addressOf, currentRoute } from "./route.js";
import { TableView } from "./table_view.js";
import { startTheme } from "./theme.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const list = document.getElementById("pipelines");

let view = null;
let shown = { pipeline: null, table: null };
let answeredAt = null;

async function read(isCurrent) {
  const { pipelines } = await get("pipelines");
  if (!isCurrent()) return;
  const route = currentRoute();
  if (route.pipeline === null && pipelines.length > 0) {
    history.replaceState(null, "", addressOf(pipelines[0].name));
    return read(isCurrent);
  }
  showPipelines(pipelines, route.pipeline);
  const summary = pipelines.find(({ name }) => name === route.pipeline);
  if (summary) await showView(route, summary, isCurrent);
  else
    showMissing(
      `There is no pipeline ${route.pipeline} here.`,
      pipelines.length > 0 ? addressOf(pipelines[0].name) : "#/",
    );
  if (isCurrent()) showConnected();
}

async function showView({ pipeline, table, show }, summary, isCurrent) {
  if (view === null || pipeline !== shown.pipeline || table !== shown.table) {
    closeView();
    if (pipeline !== shown.pipeline) forgetAnswers();
    view = table === null ? new Overview(pipeline, () => poll.now()) : new TableView(pipeline, table, () => poll.now());
    shown = { pipeline, table };
    document.title = `${table === null ? "" : `${visible(table)} · `}${visible(pipeline)} · tailrace`;
  }
  if (table === null) view.tables.show(show);
  try {
    await view.read(isCurrent, summary);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 404 || !isCurrent()) throw error;
    showMissing(error.message, addressOf(pipeline));
    return;
  }
  if (isCurrent() && !view.node.isConnected) main.replaceChildren(view.node);
}

function closeView() {
  view?.close();
  view = null;
}

function showMissing(text, back) {
  closeView();
  shown = { pipeline: null, table: null };
  refill(
    main,
    element(
      "section",
      { class: "card empty" },
      element("h1", {}, visible(text)),
      element("a", { class: "button", href: back }, "Back"),
    ),
  );
}

function showPipelines(pipelines, current) {
  // One pipeline alone needs no switch.
  list.hidden = pipelines.length < 2;
  refill(
    list,
    pipelines.map(({ name, health }) =>
      element(
        "a",
        { href: addressOf(name), "aria-current": name === current ? "page" : null, "data-key": name },
        element("span", { class: `dot ${health.level}`, role: "img", "aria-label": health.level }),
        visible(name),
      ),
    ),
  );
}

function showConnected() {
  answeredAt = new Date().toISOString();
  connection.className = "connection live";
  if (connection.textContent !== "live") connection.textContent = "live";
}

function failed(error) {
  if (error.status === 401) {
    closeView();
    list.hidden = true;
    connection.textContent = "";
    if (!main.querySelector("form")) main.replaceChildren(loginForm(() => poll.now()));
    return;
  }
  connection.className = "connection lost";
  const text = problemOf(error);
  if (connection.textContent !== text) connection.textContent = text;
}

function problemOf(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return "this page has met an error: reload it";
  }
  if (error.status !== 0) return error.message;
  return answeredAt ? `no connection since ${clock(answeredAt, { seconds: true })}` : "no connection";
}

function showKeys() {
  const rows = KEYS.map(([key, does]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, does)]);
  askFirst({ title: "Keyboard", body: [element("dl", { class: "keys" }, rows)], no: "Close" });
}

function goBack() {
  const { pipeline, table, show } = currentRoute();
  const search = document.getElementById("search");
  if (document.activeElement === search) {
    search.value = "";
    search.dispatchEvent(new Event("input"));
    search.blur();
  } else if (table !== null || show !== null) location.hash = addressOf(pipeline);
}

const themeButton = document.getElementById("theme");
const poll = new Poll(read, failed);

startTheme(themeButton);
startKeyboard({
  "/": () => document.getElementById("search")?.focus(),
  j: () => view?.tables?.move(1),
  k: () => view?.tables?.move(-1),
  t: () => themeButton.click(),
  "?": showKeys,
  Escape: goBack,
});
document.getElementById("keys").onclick = showKeys;
document.getElementById("skip").onclick = (event) => {
  // The fragment is the route: the link moves the focus and nothing else.
  event.preventDefault();
  main.focus();
};
addEventListener("hashchange", () => {
  const { pipeline, table, show } = currentRoute();
  if (pipeline === shown.pipeline && table === shown.table) {
    view?.tables?.show(show);
    return;
  }
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
  poll.now();
});
await logInByAddress();
poll.now();
