// Numbers, sizes, times and names as people read them.

const WHOLE = new Intl.NumberFormat("en");
const NONE = "–";

export function count(number) {
  return number === null || number === undefined ? NONE : WHOLE.format(Math.round(number));
}

/** `9,120` but `12.3 k` and `48.2 m`: for columns that have to stay narrow. */
export function short(number) {
  if (number === null || number === undefined) return NONE;
  if (number > 0 && number < 10 && number % 1 >= 0.05) return number.toFixed(1);
  if (number < 10_000) return WHOLE.format(Math.round(number));
  for (const [unit, size] of [
    ["k", 1e3],
    ["m", 1e6],
    ["bn", 1e9],
  ]) {
    const shown = number / size;
    if (shown < 999.5 || unit === "bn")
      return `${shown < 99.95 ? shown.toFixed(1) : WHOLE.format(Math.round(shown))} ${unit}`;
  }
  return NONE;
}

export function bytes(number) {
  if (number === null || number === undefined) return NONE;
  let value = number;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 999.5 || unit === "TB")
      return `${unit === "B" || value >= 99.95 ? Math.round(value) : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return NONE;
}

/** `1.2 s`, `4 min`, `3 h 40 min`, `2 d 5 h`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 9.95) return `${seconds === 0 ? "0" : seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${Math.floor(hours / 24)} d`;
}

/** Seconds from now on until then; negative when it is over. */
export function secondsUntil(iso) {
  return (Date.parse(iso) - Date.now()) / 1000;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const SHORT_CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

/** A time of this machine's clock; the day as well, unless it is today. */
export function clock(iso, { seconds = false } = {}) {
  if (!iso) return NONE;
  const at = new Date(iso);
  const text = (seconds ? CLOCK : SHORT_CLOCK).format(at);
  return at.toDateString() === new Date().toDateString() ? text : `${DAY.format(at)} ${text}`;
}

// Marks that turn text around, and those that cannot be seen: two names that look alike must not be different ones.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/gu;

/** A name with everything invisible in it made visible. */
export function visible(name) {
  return name.replace(UNSEEN, (mark) => `⟨U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** The same for a text that may have several lines. */
export function visibleLines(text) {
  return text.split("\n").map(visible).join("\n");
}

/** Where in a server's log something is, as Postgres writes it: `2A/80456F9C`. */
export function lsn(position) {
  return `${position.slice(0, 8).replace(/^0{1,7}/, "")}/${position.slice(8, 16).replace(/^0{1,7}/, "")}`.toUpperCase();
}

const TAIL = 16;
const SHORTEST_TAIL = 6;
const MOST = 28;

/** A name for where there is little room, without its beginning if it is long. */
export function shortened(name) {
  const letters = Array.from(visible(name));
  return letters.length <= MOST ? letters.join("") : `…${letters.slice(1 - MOST).join("")}`;
}

/** The two parts of a name of which the first may be cut: names of one database differ at their ends. */
export function headAndTail(name) {
  const letters = Array.from(visible(name));
  if (letters.length <= TAIL + 4) return [letters.join(""), ""];
  // Rather between two words than within one.
  const word = letters.slice(-TAIL).findIndex((letter) => "_.-".includes(letter));
  const tail = word >= 0 && TAIL - word >= SHORTEST_TAIL ? TAIL - word : TAIL;
  return [letters.slice(0, -tail).join(""), letters.slice(-tail).join("")];
}
