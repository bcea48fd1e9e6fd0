// Where the time went, and options and results side by side.

/** What an iteration's time divides into without overlap; other times are parts of these. */
const PARTS = ["generate_seconds", "gather_seconds", "training_seconds", "others_seconds"];

/** A card with the shares of a run's time at a step and over all of them; null for a run without times. */
function buildTimes(run, step) {
  const names = Object.keys(run.figures).filter((name) => name.endsWith("_seconds"));
  if (names.length === 0) return null;
  const at = lastUpTo(run.steps, step);
  const sum = (name) => run.figures[name].reduce((total, value) => total + (Number(value) || 0), 0);
  const parts = PARTS.filter((name) => name in run.figures);
  const all = "e2e_seconds" in run.figures ? sum("e2e_seconds") : parts.reduce((total, name) => total + sum(name), 0);
  const paint = (made, index) => styled(made, "--part", `var(--run-${index})`);
  const bar = element("div", { class: "shares", role: "img", "aria-label": parts.map((name) =>
    `${name} ${Math.round((100 * sum(name)) / all)} %`).join(", ") });
  parts.forEach((name, index) => {
    const part = paint(element("span", { title: name }), index);
    part.style.width = `${(100 * sum(name)) / all}%`;
    bar.append(part);
  });
  const rows = [...parts, ...names.filter((name) => !parts.includes(name))].map((name) => [
    parts.includes(name) ? paint(element("span", { class: "part" }, name), parts.indexOf(name)) : name,
    format(at < 0 ? null : run.figures[name][at]), format(sum(name)), all ? `${((100 * sum(name)) / all).toFixed(1)} %` : "–",
  ]);
  return element("article", { class: "card" }, element("h3", {}, chip(run, run.name)), bar,
    element("div", { class: "scroll", tabindex: "0" },
      table([["seconds", `step ${at < 0 ? "–" : run.steps[at]}`, "whole run", "share"], ...rows])));
}

/** A table of options and results, a column per run; rows that differ are marked, and may be the only ones. */
function buildOptions(runs, onlyWhatDiffers) {
  const rows = ["options", "result"].flatMap((kind) => {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run[kind])))];
    return names.map((name) => [kind === "result" ? `result: ${name}` : name, runs.map((run) => run[kind][name])]);
  });
  const differs = (values) => new Set(values.map((value) => JSON.stringify(value))).size > 1;
  const body = rows.filter(([, values]) => !onlyWhatDiffers || differs(values)).map(([name, values]) => {
    const isMarked = runs.length > 1 && differs(values);
    const cells = values.map((value) => element("td", {}, value === undefined ? "–" : value === null ? "none" : format(value)));
    return element("tr", isMarked ? { class: "differs" } : {},
      element("th", { scope: "row" }, isMarked ? `≠ ${name}` : name), ...cells);
  });
  const headings = runs.map((run) => element("th", { scope: "col" }, chip(run, run.name)));
  return element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "option"), ...headings)),
    element("tbody", {}, ...body));
}

/** A run's held-out samples, before and after, as they were written. */
function buildSamples(run) {
  const headings = Object.keys(run.samples[0]);
  const rows = run.samples.map((row) => headings.map((name) => element("div", { class: "text" }, format(row[name]))));
  return element("details", {}, element("summary", {}, chip(run, `${run.name}: ${run.samples.length} samples`)),
    element("div", { class: "scroll", tabindex: "0" }, table([headings, ...rows])));
}

/** A card on how a run's answers compare with its teacher's distributions: by position, and where they differ most. */
function buildTeacher(run, entry) {
  const rows = entry.positions.map((line) => [
    line.first === line.last ? `${line.first + 1}` : `${line.first + 1}–${line.last + 1}`, format(line.tokens),
    `${(100 * line.agreement).toFixed(1)} %`, ...["divergence", "entropy", "teacher_entropy"].map((name) => format(line[name])),
  ]);
  const shown = (token) => String(token).replaceAll("\n", "⏎");
  const tokens = entry.tokens.map((token) => [
    format(token.divergence), element("span", { class: "text" }, `…${token.before}`),
    ...["token", "top", "teacher_top"].map((name) => element("span", { class: "text" }, shown(token[name]))),
  ]);
  const scroll = (made) => element("div", { class: "scroll", tabindex: "0" }, made);
  return element("article", { class: "card" }, element("h3", {}, chip(run, `${run.name}, step ${entry.step}`)),
    element("p", { class: "note" }, "By position in the answer; a token agrees if both find the same one likeliest. In nats a token."),
    scroll(table([["position", "tokens", "agreement", "divergence", "entropy", "teacher's entropy"], ...rows])),
    element("p", { class: "note" }, "Where they differ most."),
    scroll(table([["divergence", "text before", "token", "model's likeliest", "teacher's likeliest"], ...tokens])));
}
