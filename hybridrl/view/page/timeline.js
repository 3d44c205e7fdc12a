// The timeline: a row per thread of the driver and per rank, with what each did, and the idle share of each rank.

import { ask, choice, el, field, runChoice, short, shownRuns, table } from "./core.js";

const ROW = 22;
const LEFT = 150; // for the names of rows
const TOP = 22; // for the axis
const PALETTE = ["#3d8fd1", "#e08a3c", "#41a86a", "#9a6bbf", "#cf5b4f", "#b5a02a", "#2fa3ad", "#d36d9c", "#7a8694"];

export function showTimeline(place) {
  const wish = { job: "", first: "", last: "" };
  let run = shownRuns()[0];
  let answer = null;
  let ended = false;
  let follows = true; // the newest steps, until others are chosen
  const controls = el("div", { className: "controls" });
  const canvas = el("canvas", { className: "timeline" });
  const hint = el("div", { className: "hint", hidden: true });
  const facts = el("div");
  const area = el("div", { className: "card" }, canvas);
  let shape = null; // {rows, from, to} in microseconds
  place.append(controls, area, facts, hint);

  async function load() {
    const found = await ask(run, "timeline", Object.entries(wish));
    if (ended) return;
    answer = found;
    showControls();
    area.hidden = !answer.events.length;
    if (!answer.events.length) {
      facts.replaceChildren(el("p", { className: "empty card" }, answer.jobs.length ? "no step is complete in this trace" : "this run has no trace: set trainer.trace=true"));
      return;
    }
    shape = layOut(answer.events);
    draw();
    showFacts();
  }

  function showControls() {
    const number = (name, shown) => {
      const control = el("input", { className: "short", type: "number", value: shown ?? "", onchange: () => {
        follows = false;
        wish.first = String(answer.first);
        wish.last = String(answer.last);
        wish[name] = control.value;
        load();
      } });
      return control;
    };
    const move = (by) => {
      const width = answer.last - answer.first + 1;
      follows = false;
      wish.first = String(Math.max(answer.steps[0], answer.first + by * width));
      wish.last = String(Number(wish.first) + width - 1);
      load();
    };
    controls.replaceChildren(...[
      runChoice(run, (value) => { run = value; Object.assign(wish, { job: "", first: "", last: "" }); load(); }),
      answer.jobs.length > 1 ? field("job", choice(answer.jobs.map((job) => [job, job]), answer.job, (value) => { Object.assign(wish, { job: value, first: "", last: "" }); load(); })) : null,
      ...(answer.steps ? [field("from step", number("first", answer.first)), field("to step", number("last", answer.last)),
        el("button", { onclick: () => move(-1), disabled: answer.first <= answer.steps[0] }, "earlier"),
        el("button", { onclick: () => move(1), disabled: answer.last >= answer.steps[1] }, "later"),
        el("span", { className: "quiet" }, `of steps ${answer.steps[0]} to ${answer.steps[1]}; drag to zoom, double-click to zoom out`)] : []),
    ].filter(Boolean));
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth || 900;
    const height = TOP + shape.rows.length * ROW + 6;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const [text, quiet, line] = ["--text", "--quiet", "--line"].map((name) => style.getPropertyValue(name).trim());
    const at = (moment) => LEFT + ((moment - shape.from) / (shape.to - shape.from)) * (width - LEFT);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawAxis(pen, shape, { at, height, quiet, line });
    shape.rows.forEach((row, i) => {
      const y = TOP + i * ROW;
      pen.fillStyle = row.isFirst ? text : quiet;
      pen.fillText(row.name, 2, y + ROW / 2, LEFT - 8);
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, y, width - LEFT, ROW);
      pen.clip();
      for (const event of row.events) drawEvent(pen, event, { x: at(event.ts), end: at(event.ts + event.dur), y, line });
      pen.restore();
    });
    canvas.title = "";
  }

  function eventAt(x, y) {
    const row = shape?.rows[Math.floor((y - TOP) / ROW)];
    const moment = shape && momentAt(x);
    return row?.events.filter((event) => event.ts <= moment && moment <= event.ts + event.dur).sort((a, b) => a.dur - b.dur)[0];
  }

  const momentAt = (x) => shape.from + ((x - LEFT) / (canvas.clientWidth - LEFT)) * (shape.to - shape.from);
  let pressed = null;
  canvas.onmousedown = (event) => { pressed = event.offsetX; };
  canvas.onmouseup = (event) => {
    if (pressed !== null && Math.abs(event.offsetX - pressed) > 4) {
      [shape.from, shape.to] = [momentAt(Math.max(LEFT, Math.min(pressed, event.offsetX))), momentAt(Math.max(pressed, event.offsetX))];
      draw();
    }
    pressed = null;
  };
  canvas.ondblclick = () => { Object.assign(shape, shape.whole); draw(); };
  canvas.onmouseleave = () => { hint.hidden = true; };
  canvas.onmousemove = (event) => {
    const found = eventAt(event.offsetX, event.offsetY);
    hint.hidden = !found;
    if (!found) return;
    hint.textContent = `${found.name} · ${short(found.dur / 1e6)} s${found.args?.step ? ` · step ${found.args.step}` : ""}${found.args?.role ? ` · ${found.args.role}` : ""}`;
    hint.style.left = `${Math.min(event.clientX + 14, innerWidth - 260)}px`;
    hint.style.top = `${event.clientY + 14}px`;
  };

  function showFacts() {
    const share = (part, whole, name) => el("span", { className: name, style: { width: `${(100 * part) / whole}%` } });
    const ranks = answer.ranks.map((rank) => [`${rank.role} ${rank.rank}`, rank.working_s, rank.waiting_s, `${(100 * rank.idle_share).toFixed(1)} %`,
      el("div", { className: "shares" }, share(rank.working_s, answer.seconds, "work"), share(rank.waiting_s, answer.seconds, "wait"))]);
    const stages = Object.entries(answer.stages).map(([name, [took, waited]]) => [name, took, `${((100 * took) / answer.seconds).toFixed(1)} %`, waited]);
    facts.replaceChildren(el("div", { className: "two" },
      el("div", {}, el("h2", {}, `Ranks in ${short(answer.seconds)} s`), table(["rank", "s at work", "s waiting for data", "its process idle", ""], ranks),
        el("p", { className: "quiet" }, el("span", { className: "key work" }), "at work", el("span", { className: "key wait" }), "waiting for data", el("span", { className: "key idle" }), "other roles of the process, or idle")),
      el("div", {}, el("h2", {}, "Stages"), table(["stage", "s", "of the time", "s waiting for workers"], stages))));
  }

  const resized = new ResizeObserver(() => { if (shape) draw(); });
  resized.observe(area);
  load();
  return { changed: (changedRun) => { if (follows && changedRun === run) load(); }, end: () => { ended = true; resized.disconnect(); } };
}

/** Return the rows of trace events in their order, and the times that they cover. */
export function layOut(events) {
  const names = new Map();
  const rows = new Map();
  for (const event of events) {
    if (event.ph === "M" && event.name === "process_name") names.set(event.pid, event.args.name);
    if (event.ph === "M" && event.name === "thread_name") rows.set(event.tid, { group: event.pid, title: event.args.name, events: [] });
  }
  for (const event of events) if (event.ph === "X") rows.get(event.tid).events.push(event);
  const shown = [...rows.values()].filter((row) => row.events.length);
  shown.sort((a, b) => a.group - b.group);
  shown.forEach((row, i) => {
    row.isFirst = i === 0 || shown[i - 1].group !== row.group;
    row.name = row.isFirst ? `${names.get(row.group)} · ${row.title}` : `      ${row.title}`;
  });
  const steps = shown.find((row) => row.title === "steps") ?? shown[0];
  const from = Math.min(...steps.events.map((event) => event.ts));
  const to = Math.max(...steps.events.map((event) => event.ts + event.dur));
  return { rows: shown, from, to, whole: { from, to } };
}

function drawAxis(pen, { from, to }, { at, height, quiet, line }) {
  const width = (to - from) / 1e6;
  const size = 10 ** Math.floor(Math.log10(width / 4));
  const gap = [1, 2, 5, 10].map((factor) => factor * size).find((one) => width / one <= 8) ?? size;
  for (let second = 0; second <= width; second += gap) {
    const x = at(from + second * 1e6);
    pen.fillStyle = line;
    pen.fillRect(x, TOP - 4, 1, height);
    pen.fillStyle = quiet;
    pen.fillText(`${short(second)} s`, x + 3, TOP / 2);
  }
}

function drawEvent(pen, event, { x, end, y, line }) {
  const width = Math.max(1, end - x);
  const isWait = event.cat === "wait";
  pen.fillStyle = isWait ? line : colourOf(event.cat === "step" ? `step ${event.args.step % 2}` : event.name);
  pen.fillRect(x, isWait ? y + ROW - 6 : y + 2, width, isWait ? 3 : ROW - 4);
  if (!isWait && pen.measureText(event.name).width < width - 8) {
    pen.fillStyle = "#fff";
    pen.fillText(event.name, x + 4, y + ROW / 2);
  }
}

/** Return a colour for a name: the same for the same name. */
function colourOf(name) {
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) >>> 0;
  return PALETTE[sum % PALETTE.length];
}
