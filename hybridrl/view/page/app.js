// The frame of the page: which runs and which view are shown, and the stream of changes.

import { el, report, shownRuns, state } from "./core.js";
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

let current = null; // {name, parts: {changed, end}} of the view that is shown

function showRuns() {
  document.getElementById("runs").replaceChildren(...[...state.runs.values()].map((run) => {
    const box = el("input", { type: "checkbox", checked: state.shown.has(run.id), onchange: () => {
      box.checked ? state.shown.add(run.id) : state.shown.delete(run.id);
      show();
    } });
    const steps = run.step === null ? "no step yet" : `step ${run.step}${run.total_steps ? ` of ${run.total_steps}` : ""}${run.state ? `, ${run.state}` : ""}`;
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
