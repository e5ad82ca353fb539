// A table's state in one word, and the groups that the list can be narrowed to.

const WORDS = {
  Init: ["waiting", "Waiting"],
  DataSync: ["copying", "Copying"],
  FinishedCopy: ["catching-up", "Catching up"],
  SyncWait: ["catching-up", "Catching up"],
  Catchup: ["catching-up", "Catching up"],
  SyncDone: ["catching-up", "Catching up"],
  Ready: ["following", "Following"],
  Errored: ["stopped", "Stopped"],
};

/** `stopped`, `copying`, `catching-up`, `waiting`, `paused` or `following`: those that matter most come first. */
export const KINDS = ["stopped", "copying", "catching-up", "waiting", "paused", "following"];

/** The filters of the list, by the word that stands in the address. */
export const FILTERS = [
  ["all", "All"],
  ["stopped", "Needs you"],
  ["copying", "Copying"],
  ["catching-up", "Catching up"],
  ["following", "Following"],
  ["paused", "Paused"],
  ["waiting", "Waiting"],
];

export function kindOf(table) {
  // A table that is in error stays so while it is paused, and the error is what people have to know.
  if (table.paused_at && table.state !== "Errored") return "paused";
  return WORDS[table.state]?.[0] ?? "waiting";
}

export function wordOf(table) {
  const word = WORDS[table.state]?.[1] ?? table.state;
  if (!table.paused_at) return word;
  return table.state === "Errored" ? `${word}, paused` : "Paused";
}

const ICONS = { "catching-up": "copying" };

export function iconOf(kind) {
  return ICONS[kind] ?? kind;
}
