// The page: one state (step, runs shown, prompt), and every part redrawn from it.

const { runs, differences } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
runs.forEach((run, index) => {
  run.index = index;
  indexAnswers(run);
});
const steps = [...new Set(runs.flatMap((run) => [...run.steps, ...run.evaluated]))].sort((a, b) => a - b);
const prompts = [...new Set(runs.flatMap((run) => [...run.byPrompt.keys()]))];
const figures = [...new Set(runs.flatMap((run) => Object.keys(run.figures)))];
const isTimeOrMemory = (name) => /(_seconds|_ms|_bytes)$|_per_second/.test(name);
const hidden = new Set();
const curves = new Map();

function shownRuns() {
  return runs.filter((run) => !hidden.has(run));
}

function chosenStep() {
  return steps[Number(byId("step").value)] ?? 0;
}

function pickStep(step) {
  const before = Math.max(lastUpTo(steps, step), 0);
  const isNearerToNext = before + 1 < steps.length && steps[before + 1] - step < step - steps[before];
  byId("step").value = before + (isNearerToNext ? 1 : 0);
  showStep();
}

/** Redraws what depends on the step or on which runs are shown. */
function showStep() {
  const [step, shown] = [chosenStep(), shownRuns()];
  byId("step-value").textContent = step;
  byId("step").setAttribute("aria-valuetext", `step ${step}`);
  for (const curve of curves.values()) curve.show(step, shown);
  showAnswers();
  byId("histograms").replaceChildren(...buildHistograms(shown.filter((run) => run.answers.length), step));
  const taught = shown.filter((run) => run.teacher.length);
  byId("teachers").replaceChildren(...taught.map((run) => buildTeacher(run, entryAt(run.teacher, step))));
  byId("times").replaceChildren(...shown.map((run) => buildTimes(run, step)).filter((card) => card !== null));
}

function showAnswers() {
  const prompt = prompts[byId("prompt").selectedIndex];
  if (prompt === undefined) return;
  byId("prompt-text").textContent = prompt;
  const asked = shownRuns().filter((run) => run.answers.length);
  const parts = () => [...byId("answers").querySelectorAll("details")];
  const areOpen = parts().map((part) => part.open);
  byId("answers").replaceChildren(...asked.map((run) => buildAnswers(run, prompt, chosenStep())));
  parts().forEach((part, index) => (part.open = areOpen[index] ?? part.open)); // as the reader left them
}

function showOptions() {
  byId("options").replaceChildren(buildOptions(shownRuns(), byId("only").checked));
}

function showFigures() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const cards = [...byId("figures").children];
  for (const card of cards) card.hidden = !card.dataset.figure.toLowerCase().includes(wanted);
  byId("no-figures").hidden = cards.some((card) => !card.hidden);
}

function buildLegend() {
  for (const run of runs) {
    const box = element("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(run);
      else hidden.add(run);
      showStep();
      showOptions();
    });
    byId("legend").append(element("label", {}, box, " ", chip(run, run.name)));
  }
}

function buildPage() {
  buildLegend();
  for (const name of figures) {
    const curve = buildCurve(name, runs, steps, pickStep);
    curves.set(name, curve);
    byId(isTimeOrMemory(name) ? "time-curves" : "figures").append(curve.card);
  }
  byId("prompt").append(...prompts.map((prompt) => element("option", {}, prompt.slice(0, 120))));
  byId("samples").append(...runs.filter((run) => run.samples.length).map(buildSamples));
  byId("differences").append(...differences.map((line) => element("li", {}, line)));
  byId("step").max = Math.max(steps.length - 1, 0);
  byId("step").value = byId("step").max;
  byId("answers-section").hidden = byId("histograms-section").hidden = prompts.length === 0;
  byId("teacher-section").hidden = !runs.some((run) => run.teacher.length);
  byId("samples-section").hidden = !runs.some((run) => run.samples.length);
  byId("time-section").hidden = !figures.some(isTimeOrMemory);
  byId("only-label").hidden = runs.length < 2;
  byId("step").addEventListener("input", showStep);
  byId("prompt").addEventListener("change", showAnswers);
  byId("only").addEventListener("change", showOptions);
  byId("filter").addEventListener("input", showFigures);
  showStep();
  showOptions();
}

buildPage();
