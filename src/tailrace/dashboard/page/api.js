// The JSON API: asked again and again while the page is seen, and only for what has changed.

const ROOT = "api/v1";
const PAUSE_SECONDS = 2;
const LONGEST_PAUSE_SECONDS = 30;
const ANSWER_SECONDS = 10;

/** An answer that is an error. `status` is 0 when there was none; `fix` is what the server advises. */
export class ApiError extends Error {
  constructor(status, message, fix = null) {
    super(message);
    this.status = status;
    this.fix = fix;
  }
}

export function placeOf(pipeline, ...rest) {
  return ["pipelines", pipeline, ...rest].map(encodeURIComponent).join("/");
}

/** The last answer of each path, with the address it was given for: of a list that is asked for since a version, the
 *  one since an earlier version is of no use any more. */
const known = new Map();

/** The JSON at a place below the API. An answer that is still the same is the same object. */
export async function get(place) {
  const [path] = place.split("?");
  const before = known.get(path)?.place === place ? known.get(path) : null;
  const answer = await request(`${ROOT}/${place}`, { headers: before ? { "If-None-Match": before.tag } : {} });
  if (answer.status === 304) return before.value;
  const value = await answer.json();
  known.set(path, { place, tag: answer.headers.get("ETag"), value });
  return value;
}

/** Forget answers: another pipeline is shown, and old ones would only fill the memory. */
export function forgetAnswers() {
  known.clear();
}

export async function post(place, value) {
  const answer = await request(`${ROOT}/${place}`, withBody(value));
  return answer.json();
}

/** Exchange the token for a cookie that scripts cannot read. Raises ApiError 401 for a wrong one. */
export async function logIn(token) {
  await request("login", withBody({ token }));
}

function withBody(value) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) };
}

async function request(address, options) {
  let answer;
  try {
    answer = await fetch(address, {
      ...options,
      cache: "no-store",
      signal: AbortSignal.timeout(ANSWER_SECONDS * 1000),
    });
  } catch {
    throw new ApiError(0, "no answer from the dashboard's server");
  }
  if (answer.ok || answer.status === 304) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, error?.message ?? `the server answered ${answer.status}`, error?.fix?.text ?? null);
}

/** Calls `read` every other second. Pauses while the page is hidden, waits longer after each failure. */
export class Poll {
  #read;
  #failed;
  #timer = null;
  #failures = 0;
  #turn = 0;

  constructor(read, failed) {
    this.#read = read;
    this.#failed = failed;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#stop() : this.now()));
  }

  /** Read at once, and go on from there. What an earlier reading still brings is of no interest any more. */
  now() {
    this.#stop();
    return this.#run(this.#turn);
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#turn += 1;
  }

  async #run(turn) {
    const isCurrent = () => turn === this.#turn;
    try {
      await this.#read(isCurrent);
      this.#failures = 0;
    } catch (error) {
      if (!isCurrent()) return;
      this.#failures += 1;
      this.#failed(error);
    }
    if (!isCurrent() || document.hidden) return;
    const pause = Math.min(PAUSE_SECONDS * 2 ** this.#failures, LONGEST_PAUSE_SECONDS);
    this.#timer = setTimeout(() => this.#run(turn), pause * 1000);
  }
}
