// A table's state in one word, and the groups that the list can be narrowed to.

const WORDS = {
  Init: "Waiting",
  DataSync: "Copying",
  FinishedCopy: "Catching up",
  SyncWait: "Catching up",
  Catchup: "Catching up",
  SyncDone: "Following",
  Ready: "Following",
  Errored: "Stopped",
};

/** The groups of tables, by the word the API has for each; those that matter most come first. */
export const GROUPS = ["errored", "copying", "paused", "following"];

/** The filters of the list, by the word that stands in the address. */
export const FILTERS = [
  ["all", "All"],
  ["errored", "Needs you"],
  ["copying", "Copying"],
  ["paused", "Paused"],
  ["following", "Following"],
];

export function wordOf(table) {
  const word = WORDS[table.state] ?? table.state;
  if (!table.paused_at) return word;
  return table.group === "errored" ? `${word}, paused` : "Paused";
}
