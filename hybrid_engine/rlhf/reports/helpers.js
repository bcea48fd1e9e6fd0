// What all parts of the page share. Whatever comes from a run is put in as text, never as markup.

/** A new element with attributes and children, which may be texts. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** A new SVG element. */
function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** An element whose CSS variable `name` is `value`. */
function styled(made, name, value) {
  made.style.setProperty(name, value);
  return made;
}

/** A run's colour, as a CSS value. */
function colour(run) {
  return `var(--run-${run.index % 8})`;
}

/** A run's name behind its colour. */
function chip(run, ...more) {
  return styled(element("span", { class: "run" }, ...more), "--run", colour(run));
}

/** A number in few characters; other values as they are. */
function format(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return Array.isArray(value) ? value.join(" ") : String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Bytes in the unit that fits. */
function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < units.length - 1) [value, power] = [value / 1024, power + 1];
  return `${format(Number(value.toPrecision(3)))} ${units[power]}`;
}

/** A figure's value as its name asks for. */
function formatFigure(name, value) {
  return name.endsWith("_bytes") && typeof value === "number" ? formatBytes(value) : format(value);
}

/** [smallest, largest] of the numbers in a list; null without any. */
function extent(values) {
  let found = null;
  for (const value of values) {
    if (typeof value !== "number") continue;
    found = found === null ? [value, value] : [Math.min(found[0], value), Math.max(found[1], value)];
  }
  return found;
}

/** Position of the last of `sorted` that is at most `value`; -1 when all are larger. */
function lastUpTo(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** A table of rows, the first of them headings. */
function table(rows) {
  const [headings, ...body] = rows;
  return element(
    "table", {},
    element("thead", {}, element("tr", {}, ...headings.map((cell) => element("th", { scope: "col" }, cell)))),
    element("tbody", {}, ...body.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))))),
  );
}
