// Elements from values. Whatever comes from a database is only ever text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path"]);

/** An element. What begins with `on` becomes a handler; `share` is a width, set through the CSSOM, since the policy
 *  forbids style attributes; the rest are attributes. Values and children that are null or false are left out. */
export function element(tag, values = {}, ...children) {
  const made = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made[name] = value;
    else if (name === "share") made.style.setProperty("width", `${(100 * value).toFixed(2)}%`);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const PATHS = {
  following: "M3 8.5 6.5 12 13 4.5",
  copying: "M8 2v9M4.5 8 8 11.5 11.5 8M3 14h10",
  errored: "M8 2.2 14.5 13.5h-13zM8 6.5v3M8 11.6v.1",
  paused: "M5.5 3.5v9M10.5 3.5v9",
  unknown: "M5.7 6.2a2.3 2.3 0 1 1 3.5 2c-.8.5-1.2 1-1.2 2M8 12.6v.1M8 1.2a6.8 6.8 0 1 0 0 13.6a6.8 6.8 0 0 0 0-13.6",
  system: "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12v12M8.5 5.2l3.6-.6M8.5 8h5M8.5 10.8l3.6.6",
  light: "M8 5a3 3 0 1 0 0 6a3 3 0 0 0 0-6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  dark: "M13.5 9.6A6 6 0 1 1 6.4 2.5a4.8 4.8 0 0 0 7.1 7.1",
};

/** A small drawing that repeats what the text next to it says, so hidden from screen readers. */
export function icon(name) {
  return element(
    "svg",
    { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" },
    element("path", { d: PATHS[name] }),
  );
}

/** Give `old` the children that were made new, and keep every element that is still the same kind of thing: so focus,
 *  scroll positions and selections stay where they are while figures change. */
export function refill(old, ...children) {
  const fresh = element("div", {}, ...children);
  alignChildren(old, fresh);
}

function alignChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, index) => {
    const known = old.childNodes[index];
    if (known === undefined) old.append(node);
    else if (!isAlike(known, node)) known.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (known.data !== node.data) known.data = node.data;
    } else align(known, node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function align(known, node) {
  for (const { name } of [...known.attributes])
    if (!node.hasAttribute(name) && name !== "open") known.removeAttribute(name);
  for (const { name, value } of [...node.attributes]) {
    if (name === "style") continue;
    if (known.getAttribute(name) !== value) known.setAttribute(name, value);
  }
  if (node.style.width !== known.style.width) known.style.setProperty("width", node.style.width);
  known.onclick = node.onclick;
  alignChildren(known, node);
}

function isAlike(known, node) {
  // Of two elements that differ in their key, one is not the other with new figures.
  return (
    known.nodeType === node.nodeType &&
    known.nodeName === node.nodeName &&
    (node.nodeType === Node.TEXT_NODE || known.getAttribute("data-key") === node.getAttribute("data-key"))
  );
}
