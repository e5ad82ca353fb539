// The last batches, each as long as it took, split by its phases.

import { element } from "./element.js";
import { bytes, clock, count, duration } from "./format.js";

const SHOWN = 12;
const PHASES = ["read", "decode", "collapse", "write", "commit"];

export function batchBody(batches) {
  const header = element(
    "header",
    {},
    element("h2", { id: "batches" }, "Batches"),
    element("span", { class: "soft small" }, "the last ones, by phase, and their size"),
  );
  if (batches.length === 0) return [header, element("p", { class: "empty" }, "No batch has been applied yet.")];
  const names = phaseNames(batches);
  const longest = Math.max(...batches.slice(0, SHOWN).map((batch) => Math.max(batch.seconds, 1e-9)));
  return [
    header,
    element(
      "p",
      { class: "key" },
      names.map((name, index) =>
        element("span", {}, element("i", { class: `square phase-${index + 1}`, "aria-hidden": "true" }), name),
      ),
    ),
    element(
      "ol",
      { class: "batches" },
      batches.slice(0, SHOWN).map((batch) => bar(batch, names, longest)),
    ),
  ];
}

function phaseNames(batches) {
  const found = new Set(batches.flatMap((batch) => Object.keys(batch.phases)));
  return [
    ...PHASES.filter((name) => found.has(name)),
    ...[...found].filter((name) => !PHASES.includes(name)).sort(),
  ].slice(0, 6);
}

function bar({ id, at, rows, bytes: size, seconds, phases }, names, longest) {
  // Phases overlap, so their sum may be longer than the batch: what is drawn is the share of each in the work.
  const work = names.reduce((sum, name) => sum + (phases[name] ?? 0), 0);
  const said = names.filter((name) => phases[name]).map((name) => `${name} ${duration(phases[name])}`);
  const when = clock(at, { seconds: true });
  const text = `Batch ${id}, ${when}: ${count(rows)} rows, ${bytes(size)} in ${duration(seconds)}. ${said.join(", ")}`;
  return element(
    "li",
    { "data-key": String(id), title: text },
    element("span", { class: "soft" }, String(id)),
    element(
      "div",
      { class: "track", role: "img", "aria-label": text },
      element(
        "div",
        { class: "phases", share: Math.max(seconds / longest, 0.02) },
        names.map((name, index) =>
          work && phases[name] ? element("i", { class: `phase-${index + 1}`, share: phases[name] / work }) : null,
        ),
      ),
    ),
    element("span", { class: "soft" }, bytes(size)),
    element("span", {}, duration(seconds)),
  );
}
