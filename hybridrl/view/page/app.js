// The frame of the page: which runs and which view are shown, the stream of changes, and how elements are made.
// Text of a run enters the page as text nodes only (`el`), never as HTML.

import { showCurves } from "./curves.js";
import { showFailures, showLedger, showSettings } from "./facts.js";
import { showSamples } from "./samples.js";
import { showTimeline } from "./timeline.js";

const COLOURS = ["#1f78c8", "#d9641e", "#2a9d5c", "#8e5bb0", "#c0392b", "#b59000", "#1597a5", "#d6578f"];
const VIEWS = {
  curves: ["Curves", showCurves],
  samples: ["Samples", showSamples],
  settings: ["Settings", showSettings],
  timeline: ["Timeline", showTimeline],
  failures: ["Failures and roles", showFailures],
  graph: ["Graph and ledger", showLedger],
};

export const state = { runs: new Map(), shown: new Set(), colours: new Map() };
let current = null; // {name, parts: {changed, end}} of the view that is shown

/** Return an element. `properties` are set as properties; children are elements or texts. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : String(child)));
  return element;
}

/** Return the JSON of a view of a run; shows the server's words and throws if it refuses. */
export async function ask(run, view, parameters = []) {
  const query = new URLSearchParams(parameters.filter(([, value]) => value !== "" && value !== null));
  const response = await fetch(`/api/runs/${encodeURIComponent(run)}/${view}?${query}`);
  const answer = await response.json();
  if (!response.ok) {
    report(answer.error);
    throw new Error(answer.error);
  }
  report("");
  return answer;
}

export function report(text) {
  const problem = document.getElementById("problem");
  problem.textContent = text;
  problem.hidden = !text;
}

export const shownRuns = () => [...state.runs.keys()].filter((run) => state.shown.has(run));

/** Return a number as text of at most `digits` significant digits. */
export function short(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

/** Return a labelled form control. */
export const field = (label, control) => el("label", {}, label, control);

/** Return a select element with these (value, text) options. */
export function choice(options, value, changed) {
  const select = el("select", { onchange: () => changed(select.value) });
  for (const [name, text] of options) select.append(el("option", { value: name, selected: name === value }, text));
  return select;
}

/** Return a table; cells that are numbers stand on the right. */
export function table(titles, rows) {
  const isNumber = (cell) => typeof cell === "number";
  const cell = (content, tag = "td") =>
    el(tag, { className: isNumber(content) ? "number" : "" }, isNumber(content) ? short(content) : content ?? "–");
  const head = titles.map((title, column) => el("th", { className: rows.some((row) => isNumber(row[column])) ? "number" : "" }, title));
  const body = rows.map((row) => el("tr", {}, row.map((content) => cell(content))));
  return el("div", { className: "scroll" }, el("table", { className: "list" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

/** Return a choice of one of the shown runs, or nothing if there is one only. */
export function runChoice(value, changed) {
  const runs = shownRuns();
  return runs.length > 1 ? field("run", choice(runs.map((run) => [run, run]), value, changed)) : null;
}

function showRuns() {
  document.getElementById("runs").replaceChildren(...[...state.runs.values()].map((run) => {
    const box = el("input", { type: "checkbox", checked: state.shown.has(run.id), onchange: () => {
      box.checked ? state.shown.add(run.id) : state.shown.delete(run.id);
      show();
    } });
    const steps = run.step === null ? "no step yet" : `step ${run.step}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
    return el("label", { className: "run", title: run.path }, box,
      el("span", { className: "dot", style: { background: state.colours.get(run.id) } }), run.id, el("small", {}, steps));
  }));
}

function takeRun(run) {
  const isNew = !state.runs.has(run.id);
  state.runs.set(run.id, run);
  if (isNew) {
    state.colours.set(run.id, COLOURS[(state.runs.size - 1) % COLOURS.length]);
    if (state.shown.size < COLOURS.length) state.shown.add(run.id);
  }
}

function show() {
  const name = location.hash.slice(1).split("?")[0];
  const view = VIEWS[name] ? name : "curves";
  document.getElementById("tabs").replaceChildren(...Object.entries(VIEWS).map(([key, [title]]) => {
    const link = el("a", { href: `#${key}` }, title);
    if (key === view) link.setAttribute("aria-current", "page");
    return link;
  }));
  showRuns();
  current?.parts?.end?.();
  const place = document.getElementById("view");
  place.replaceChildren();
  if (!shownRuns().length) {
    place.append(el("p", { className: "empty" }, "choose a run above"));
    current = null;
  } else {
    current = { name: view, parts: VIEWS[view][1](place) };
  }
}

function follow() {
  const live = document.getElementById("live");
  const stream = new EventSource("/api/events");
  stream.onopen = () => { live.textContent = "live"; live.className = "on"; };
  stream.onerror = () => { live.textContent = "not connected; trying again"; live.className = ""; };
  stream.onmessage = (event) => {
    const run = JSON.parse(event.data);
    const known = state.runs.get(run.id);
    if (known && JSON.stringify(known) === JSON.stringify(run)) return;
    takeRun(run);
    showRuns();
    if (state.shown.has(run.id)) current?.parts?.changed?.(run.id);
  };
}

async function start() {
  const response = await fetch("/api/runs");
  const answer = await response.json();
  if (!response.ok) return report(answer.error);
  answer.forEach(takeRun);
  addEventListener("hashchange", show);
  show();
  follow();
}

start();
