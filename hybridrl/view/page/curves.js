// The curves: one chart per metric, grouped by prefix. Charts load their data when they come into sight.

import { ask, el, field, short, shownRuns, state } from "./core.js";

const FIRST = "first look"; // the group of metrics that docs/monitoring.md names first
const FIRST_METRICS = [/^critic\/score\/mean$/, /^val-core\//, /^train\/loss$/, /^val\/loss$/, /^response_length\/mean$/, /^actor\/entropy$/, /^actor\/grad_norm$/,
  /^training\/rollout_probs_diff_mean$/, /^timing_s\/step$/, /^perf\/throughput$/,
  /^train\/loss_sum$/, /^train\/grad_norm$/, /^service\//]; // of a training service
const HEIGHT = 172;
const REFRESH_MS = 1000;
const MAX_NAMES = 40; // metrics in one request

const wish = { text: "", smooth: 0, log: false, open: new Set([FIRST]) }; // kept while the page is open
const data = new Map(); // run -> metric -> {steps, values, rows, revision}

export function showCurves(place) {
  const groups = el("div");
  const cards = new Map(); // name -> {card, plot, seen, drawn}
  const dirty = new Set();
  let ended = false;
  let timer = null;

  const sight = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const item = cards.get(entry.target.dataset.key);
      if (!item) continue;
      item.seen = entry.isIntersecting;
      if (item.seen) later(0);
    }
  }, { rootMargin: "200px" });
  const resized = new ResizeObserver(() => {
    for (const item of cards.values()) item.plot?.setSize({ width: item.box.clientWidth, height: HEIGHT });
  });
  resized.observe(groups);

  function later(wait = REFRESH_MS) {
    if (!ended && timer === null) timer = setTimeout(() => { timer = null; refresh(); }, wait);
  }

  async function refresh() {
    const seen = [...cards.values()].filter((item) => item.seen);
    const names = [...new Set(seen.map((item) => item.name))];
    const runs = shownRuns();
    await Promise.all(runs.map((run) => load(run, names)));
    if (ended) return;
    for (const item of seen) draw(item, runs);
  }

  /** Load what is missing of these metrics: all of it, or the rows since the last answer. */
  async function load(run, names) {
    const known = data.get(run) ?? new Map();
    data.set(run, known);
    const parts = new Map();
    for (const name of names) {
      const had = known.get(name);
      if (had && !dirty.has(run) && !had.old) continue;
      const key = had ? `${had.rows},${had.revision}` : "0,-1";
      parts.set(key, [...(parts.get(key) ?? []), name]);
    }
    dirty.delete(run);
    for (const entry of known.values()) entry.old = entry.old || !names.includes(entry.name);
    for (const [key, wanted] of parts) {
      for (let begin = 0; begin < wanted.length; begin += MAX_NAMES) {
        const [rows, revision] = key.split(",");
        const chosen = wanted.slice(begin, begin + MAX_NAMES).map((name) => ["name", name]);
        take(known, await ask(run, "series", [...chosen, ["since", rows], ["revision", revision]]));
      }
    }
  }

  function take(known, answer) {
    for (const [name, [steps, values]] of Object.entries(answer.series)) {
      const had = answer.since ? known.get(name) : null;
      const pairs = had ? [...had.steps.map((step, i) => [step, had.values[i]]), ...steps.map((step, i) => [step, values[i]])] : null;
      pairs?.sort((a, b) => a[0] - b[0]);
      known.set(name, {
        name, rows: answer.rows, revision: answer.revision, old: false,
        steps: pairs ? pairs.map((pair) => pair[0]) : steps,
        values: pairs ? pairs.map((pair) => pair[1]) : values,
      });
    }
  }

  function draw(item, runs) {
    const curves = runs.map((run) => [run, data.get(run)?.get(item.name)]).filter(([, curve]) => curve?.steps.length);
    const looks = JSON.stringify([wish.smooth, wish.log, curves.map(([run, curve]) => [run, curve.rows, curve.revision])]);
    if (looks === item.drawn) return;
    item.drawn = looks;
    item.plot?.destroy();
    item.plot = curves.length ? plot(item, curves) : null;
    item.box.classList.toggle("empty", !curves.length);
    if (!curves.length) item.box.textContent = "no finite value";
  }

  function showGroups(metrics) {
    const words = wish.text.toLowerCase().split(/\s+/).filter(Boolean);
    const names = [...metrics.keys()].filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    const found = new Map();
    const add = (group, name) => found.set(group, [...(found.get(group) ?? []), name]);
    for (const pattern of FIRST_METRICS) names.filter((name) => pattern.test(name)).forEach((name) => add(FIRST, name));
    for (const name of names) add(name.includes("/") ? name.split("/")[0] : "other", name);
    for (const item of cards.values()) item.plot?.destroy();
    cards.clear();
    sight.disconnect();
    const sections = [...found].map(([group, members]) => {
      const grid = el("div", { className: "charts" });
      const isOpen = wish.open.has(group) || words.length > 0;
      const section = el("details", { className: "group", open: isOpen }, el("summary", {}, `${group} `, el("span", { className: "quiet" }, `(${members.length})`)), grid);
      const fill = () => { if (!grid.childElementCount) grid.append(...members.map((name) => card(group, name, metrics.get(name)))); };
      section.addEventListener("toggle", () => {
        section.open ? wish.open.add(group) : wish.open.delete(group);
        if (section.open) fill();
      });
      if (isOpen) fill();
      return section;
    });
    groups.replaceChildren(...(sections.length ? sections : [el("p", { className: "empty" }, metrics.size
      ? "no metric has this in its name" : "no metrics yet: a run writes them with jsonl in trainer.logger")]));
  }

  function card(group, name, metric) {
    const box = el("div");
    const value = el("span", { className: "value" });
    const bad = metric.not_finite ? el("span", { className: "tag bad" }, `${metric.not_finite} not finite`) : null;
    const element = el("section", { className: "card chart" }, el("h3", {}, el("span", { title: name }, name), el("span", {}, bad, value)), box);
    element.dataset.key = `${group}|${name}`;
    cards.set(element.dataset.key, { name, box, value, plot: null, seen: false, drawn: "" });
    sight.observe(element);
    return element;
  }

  let known = "";
  async function list() {
    const answers = await Promise.all(shownRuns().map((run) => ask(run, "metrics")));
    const metrics = new Map();
    for (const metric of answers.flatMap((answer) => answer.metrics)) {
      metrics.set(metric.name, { not_finite: (metrics.get(metric.name)?.not_finite ?? 0) + metric.not_finite });
    }
    const sorted = new Map([...metrics].sort(([a], [b]) => (a < b ? -1 : 1)));
    const looks = JSON.stringify([...sorted]);
    if (ended || looks === known) return;
    known = looks;
    showGroups(sorted);
    again = () => showGroups(sorted);
  }
  let again = () => {};

  const redraw = () => { for (const item of cards.values()) item.drawn = ""; later(0); };
  const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: wish.smooth, oninput: () => { wish.smooth = Number(smooth.value); redraw(); } });
  const log = el("input", { type: "checkbox", checked: wish.log, onchange: () => { wish.log = log.checked; redraw(); } });
  const text = el("input", { type: "search", placeholder: "critic score", value: wish.text, oninput: () => { wish.text = text.value; again(); } });
  place.append(el("div", { className: "controls" }, field("metrics with", text), field("smoothing", smooth),
    el("label", { className: "row" }, log, "logarithmic"),
    el("span", { className: "quiet" }, "drag over a chart to zoom, double-click to zoom out")), groups);
  list();
  return {
    changed: (run) => { dirty.add(run); list(); later(); },
    end: () => { ended = true; clearTimeout(timer); sight.disconnect(); resized.disconnect(); for (const item of cards.values()) item.plot?.destroy(); },
  };
}

/** Return the exponential moving average of the values, without the pull of its start towards zero. */
export function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** Return the values of the runs, each in its colour: those at a step, or the last ones. */
function valuesOf(curves, shown, at) {
  const width = (shown.data.length - 1) / curves.length; // a run has a raw and a smoothed curve, or one
  const values = curves.map(([run, curve], i) => {
    const value = at === null ? curve.values.at(-1) : shown.data[(i + 1) * width][at];
    return el("span", { style: { color: state.colours.get(run) } }, ` ${value === null || value === undefined ? "–" : short(value)}`);
  });
  return at === null ? values : [`step ${shown.data[0][at]} `, ...values];
}

function plot({ box, value: corner }, curves) {
  const tables = [];
  const series = [{}];
  for (const [run, { steps, values }] of curves) {
    const colour = state.colours.get(run);
    const fit = wish.log ? values.map((value) => (value > 0 ? value : null)) : values;
    const dots = { show: steps.length < 30, size: 4 };
    if (wish.smooth > 0) {
      tables.push([steps, fit], [steps, smoothed(values, wish.smooth).map((value) => (wish.log && value <= 0 ? null : value))]);
      series.push({ stroke: `${colour}55`, width: 1, points: { show: false }, spanGaps: true });
      series.push({ stroke: colour, width: 2, points: { show: false }, spanGaps: true });
    } else {
      tables.push([steps, fit]);
      series.push({ stroke: colour, width: 1.6, points: dots, spanGaps: true });
    }
  }
  const style = getComputedStyle(document.documentElement);
  const [text, line] = [style.getPropertyValue("--quiet").trim(), style.getPropertyValue("--line").trim()];
  const axis = { stroke: text, font: "11px system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const isEmpty = tables.every(([, values]) => values.every((value) => value === null));
  return new uPlot({
    width: box.clientWidth || 330,
    height: HEIGHT,
    scales: { x: { time: false }, y: { distr: wish.log && !isEmpty ? 3 : 1 } },
    series,
    axes: [{ ...axis, size: 26 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick, 3))) }],
    hooks: {
      ready: [(shown) => corner.replaceChildren(...valuesOf(curves, shown, null))],
      setCursor: [(shown) => corner.replaceChildren(...valuesOf(curves, shown, shown.cursor.idx ?? null))],
    },
    cursor: { sync: { key: "curves" }, points: { size: 6 } },
    legend: { show: false },
  }, uPlot.join(tables.map(([steps, values]) => [steps, values])), box);
}
