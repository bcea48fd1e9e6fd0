// The same prompts' answers as training goes on, and how likely the tokens of the first answers have become.

const STRONG_CHANGE = 2; // nats: a change of so much, or more, has its full colour

/** Of a run: the steps at which it was evaluated, and per prompt its entries in that order. */
function indexAnswers(run) {
  run.evaluated = [...new Set(run.answers.map((entry) => entry.step))];
  run.byPrompt = new Map();
  for (const entry of run.answers) {
    if (!run.byPrompt.has(entry.prompt)) run.byPrompt.set(entry.prompt, []);
    run.byPrompt.get(entry.prompt).push(entry);
  }
}

/** The last of entries in order that is of `step` or an earlier one; the first when all are later. */
function entryAt(entries, step) {
  return entries[Math.max(lastUpTo(entries.map((entry) => entry.step), step), 0)];
}

/** A card with a run's answers to a prompt at a step. */
function buildAnswers(run, prompt, step) {
  const entries = run.byPrompt.get(prompt);
  const card = element("article", { class: "card" }, element("h3", {}, chip(run, run.name)));
  if (!entries) {
    card.append(element("p", { class: "note" }, "This run was not asked."));
    return card;
  }
  const entry = entryAt(entries, step);
  card.append(element("p", { class: "note" }, `after ${entry.step} steps`));
  entry.responses.forEach((response, index) => {
    const length = entry.lengths ? `, ${entry.lengths[index]} tokens` : "";
    card.append(
      element("div", { class: "answer" },
        element("div", { class: "reward" }, `reward ${format(entry.rewards[index])}${length}`),
        element("div", { class: "text" }, response)),
    );
  });
  const first = entries[0];
  if (first.tokens && first.logprobs && entry.logprobs) card.append(buildChanges(first, entry));
  return card;
}

/** The first evaluation's answers, each token coloured by the change of its log-probability since. */
function buildChanges(first, entry) {
  const details = element("details", { open: "" },
    element("summary", {}, `The answers after ${first.step} steps, token by token: likelier now, or less`),
    element("p", { class: "note" }, "Blue is likelier, orange less likely; full colour from "
      + `${STRONG_CHANGE} nats. Point at a token, or open the table, for its numbers.`));
  first.tokens.forEach((tokens, index) => {
    const numbers = tokens.map((token, at) => changeOf(token, first.logprobs[index]?.[at], entry.logprobs[index]?.[at]));
    details.append(element("div", { class: "answer text" }, ...numbers.map(buildToken)),
      element("details", {}, element("summary", {}, "table"),
        element("div", { class: "scroll", tabindex: "0" }, table([["token", "first", "now", "change"],
          ...numbers.map((n) => [n.shown, format(n.before), format(n.now), format(n.change)])]))));
  });
  return details;
}

function changeOf(token, before, now) {
  const change = typeof before === "number" && typeof now === "number" ? now - before : null;
  return { token, shown: token.replaceAll("\n", "⏎"), before, now, change };
}

function buildToken({ token, shown, before, now, change }) {
  const title = `${shown}: ${format(before)} → ${format(now)}`;
  const made = element("span", { class: "token", title }, token);
  if (!change) return made;
  made.classList.add(change > 0 ? "up" : "down");
  return styled(made, "--strength", `${Math.round(75 * Math.min(Math.abs(change) / STRONG_CHANGE, 1))}%`);
}

/** Histograms of a run's rewards and lengths at a step, against its first evaluation. */
function buildHistograms(runs, step) {
  const quantities = [
    ["reward", (entry) => entry.rewards],
    ["length in tokens", (entry) => entry.lengths ?? []],
    ["length in characters", (entry) => (entry.lengths ? [] : entry.responses.map((text) => text.length))],
  ];
  return runs.flatMap((run) => quantities.map(([name, read]) => {
    const range = extent(runs.flatMap((other) => other.answers.flatMap(read)));
    const at = run.evaluated[Math.max(lastUpTo(run.evaluated, step), 0)];
    const of = (wanted) => run.answers.filter((entry) => entry.step === wanted).flatMap(read);
    if (range === null || of(at).length === 0) return null;
    return buildHistogram(run, name, range, of(run.evaluated[0]), of(at), at);
  })).filter((card) => card !== null);
}

function buildHistogram(run, name, range, first, now, step) {
  const bins = 20;
  const count = (values) => {
    const counts = new Array(bins).fill(0);
    for (const value of values) {
      if (typeof value !== "number") continue;
      counts[Math.min(Math.floor((bins * (value - range[0])) / (range[1] - range[0] || 1)), bins - 1)] += 1;
    }
    return counts.map((number) => number / Math.max(values.length, 1));
  };
  const [before, after] = [count(first), count(now)];
  const most = Math.max(...before, ...after);
  const numbers = now.filter((value) => typeof value === "number");
  const mean = numbers.reduce((sum, value) => sum + value, 0) / numbers.length;
  const svg = shape("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img",
    "aria-label": `${name} after ${step} steps: mean ${format(mean)} of ${numbers.length} answers` });
  for (const [shares, kind] of [[after, "now"], [before, "first"]]) {
    shares.forEach((share, bin) => {
      const height = (96 * share) / most;
      if (share) svg.append(shape("rect", { class: kind, x: bin * 5 + 0.5, width: 4, y: 100 - height, height }));
    });
  }
  return styled(element("article", { class: "card histogram" },
    element("h3", {}, chip(run, `${name} after ${step} steps`)),
    element("p", { class: "values" }, `mean ${format(mean)}`),
    element("div", { class: "plot" }, svg),
    element("div", { class: "range" }, ...range.map((value) => element("span", {}, format(value))))),
  "--run", colour(run));
}
