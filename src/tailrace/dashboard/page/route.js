// What the address says is shown: `#/shop`, `#/shop?show=stopped`, `#/shop/public.orders`.

/** The pipeline and, if it names one, the table; null where the address says neither. */
export function currentRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [pipeline, table] = path.split("/").map(decoded);
  return { pipeline: pipeline || null, table: table || null, show: new URLSearchParams(query ?? "").get("show") };
}

export function addressOf(pipeline, table = null, show = null) {
  const place = `#/${encodeURIComponent(pipeline)}${table === null ? "" : `/${encodeURIComponent(table)}`}`;
  return show === null ? place : `${place}?${new URLSearchParams({ show })}`;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // An address that was cut names no table; the page then says so.
  }
}
