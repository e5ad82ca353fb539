// Where the server wants a token: the one of the address, or one that is typed.

import { logIn } from "./api.js";
import { element } from "./element.js";

/** Use the token of the address's fragment, which is never sent with a request, and take it out of the address. */
export async function logInByAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return;
  history.replaceState(null, "", location.pathname);
  await logIn(token).catch(() => null); // A wrong one: the page asks for another.
}

/** A form for the token; `done` is called once the server took it. */
export function loginForm(done) {
  const field = element("input", { type: "password", id: "token", autocomplete: "current-password", required: true });
  const problem = element("p", { class: "problem", role: "alert" });
  const send = async (event) => {
    event.preventDefault();
    try {
      await logIn(field.value);
      done();
    } catch (error) {
      problem.textContent = error.status === 401 ? "This is not the token." : error.message;
      field.select();
    }
  };
  return element(
    "form",
    { class: "card login", onsubmit: send },
    element("h1", {}, "This dashboard needs a token"),
    element("p", { class: "soft" }, "It was given to the server in the environment variable that --token-env names."),
    // Programs that keep passwords want a name to keep this one under.
    element("input", { type: "text", autocomplete: "username", value: "tailrace", hidden: true }),
    element("label", { for: "token" }, "Token"),
    field,
    problem,
    element("button", { type: "submit", class: "main" }, "Log in"),
  );
}
