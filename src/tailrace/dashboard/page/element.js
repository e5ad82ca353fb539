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
  stopped: "M8 2.2 14.5 13.5h-13zM8 6.5v3M8 11.6v.1",
  paused: "M5.5 3.5v9M10.5 3.5v9",
  waiting: "M8 4v4l3 2M8 1.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 0 0 0-13",
};

/** A small drawing that repeats what the text next to it says, so hidden from screen readers. */
export function icon(name) {
  return element("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, element("path", { d: PATHS[name] }));
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
  for (const { name } of [...known.attributes]) if (!node.hasAttribute(name) && name !== "open") known.removeAttribute(name);
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
