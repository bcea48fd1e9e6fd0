// Curves of one figure each, over the steps of all runs, with a cursor at the chosen step.

const MOST_POINTS = 600; // of a path: a curve is seldom wider in pixels

/** A curve's card: { card, show(step, runs) }; `show` moves the cursor and writes the values. `onPick` gets a step. */
function buildCurve(name, runs, steps, onPick) {
  const values = element("p", { class: "values" });
  const [top, bottom] = ["top", "bottom"].map((place) => element("span", { class: `bound ${place}` }));
  const svg = shape("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
  const plot = element("div", { class: "plot" }, svg, top, bottom);
  const card = element("article", { class: "card", "data-figure": name }, element("h3", {}, name), values, plot);
  const place = (step) => (100 * (step - steps[0])) / (steps.at(-1) - steps[0] || 1);
  let drawn = null;

  function draw(shown) {
    const range = extent(shown.flatMap((run) => run.figures[name])) ?? [0, 0];
    const height = (value) => (range[0] === range[1] ? 50 : 97 - (94 * (value - range[0])) / (range[1] - range[0]));
    const paths = shown.map((run) => {
      const path = shape("path", { d: pathOf(run.steps, run.figures[name], place, height) });
      return styled(path, "--run", colour(run));
    });
    svg.replaceChildren(shape("path", { class: "frame", d: "M0 0V100H100" }), ...paths);
    svg.append(shape("path", { class: "cursor", d: "" }));
    [bottom.textContent, top.textContent] = range.map((value) => formatFigure(name, value));
    svg.setAttribute("aria-label", `${name} over steps ${steps[0]} to ${steps.at(-1)}, from ${top.textContent} down to `
      + bottom.textContent);
  }

  function show(step, shown) {
    const present = shown.filter((run) => name in run.figures);
    const key = present.map((run) => run.index).join();
    if (key !== drawn) draw(present);
    drawn = key;
    svg.lastChild.setAttribute("d", `M${place(step)} 0V100`);
    values.replaceChildren(...present.map((run) => chip(run, valueAt(run, name, step))));
  }

  const pick = (event) => {
    const box = plot.getBoundingClientRect();
    onPick(steps[0] + ((event.clientX - box.left) / box.width) * (steps.at(-1) - steps[0]));
  };
  plot.addEventListener("pointerdown", (event) => {
    plot.setPointerCapture(event.pointerId);
    pick(event);
  });
  plot.addEventListener("pointermove", (event) => event.buttons && pick(event));
  return { card, show };
}

/** The last value of a figure up to a step, as text that says if it is of an earlier one. */
function valueAt(run, name, step) {
  let at = lastUpTo(run.steps, step);
  while (at >= 0 && run.figures[name][at] === null) at -= 1;
  if (at < 0) return "–";
  const text = formatFigure(name, run.figures[name][at]);
  return run.steps[at] === step ? text : `${text} (step ${run.steps[at]})`;
}

/** An SVG path through the numbers of a figure, past steps without it; it breaks at what is no number, such as NaN. */
function pathOf(steps, values, place, height) {
  let path = "";
  let isDown = false;
  for (const at of thinned(values)) {
    if (values[at] === null) continue;
    const isNumber = typeof values[at] === "number";
    if (isNumber) path += `${isDown ? "L" : "M"}${place(steps[at]).toFixed(2)} ${height(values[at]).toFixed(2)}`;
    if (isNumber && !isDown) path += "h0";
    isDown = isNumber;
  }
  return path;
}

/** Which positions to draw: all of them, or of each stretch the smallest and the largest number, in order. */
function thinned(values) {
  const size = Math.ceil((2 * values.length) / MOST_POINTS);
  if (values.length <= MOST_POINTS) return values.keys();
  const chosen = [];
  for (let start = 0; start < values.length; start += size) {
    let [low, high] = [start, start];
    for (let at = start; at < Math.min(start + size, values.length); at += 1) {
      if (typeof values[at] !== "number") continue;
      if (typeof values[low] !== "number" || values[at] < values[low]) low = at;
      if (typeof values[high] !== "number" || values[at] > values[high]) high = at;
    }
    chosen.push(...new Set([Math.min(low, high), Math.max(low, high)]));
  }
  return chosen;
}
