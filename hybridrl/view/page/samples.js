// The samples: a page of them at a time, searched on disk by the server.

import { ask, choice, el, field, report, runChoice, short, shownRuns } from "./core.js";

const PAGE = 20;
const SAME = 1e-9; // smaller differences are none
const KNOWN = new Set(["step", "input", "output", "gts", "score", "id", "prompt_id", "place", "version", "valid"]);
const COLOURINGS = {
  difference: ["log-prob: trainer − rollout", (token) => token.old - token.rollout],
  advantage: ["advantage", (token) => token.advantage],
  surprise: ["surprise: −log-prob of the rollout", (token) => -token.rollout],
};
const wish = { kind: "rollout", text: "", lowest: "", highest: "", first: "", last: "", order: "newest", prompt: "" };

export function showSamples(place) {
  let run = shownRuns()[0];
  let next = null;
  let asked = 0; // answers to earlier questions are dropped
  const list = el("div");
  const state = el("p", { className: "quiet" });
  const chart = el("div");
  const more = el("button", { onclick: () => load(next) }, "more");
  const found = []; // samples shown, for the chart of one prompt

  const input = (name, properties) => {
    const control = el("input", { value: wish[name], ...properties, onchange: () => { wish[name] = control.value; } });
    control.addEventListener("keydown", (event) => { if (event.key === "Enter") { wish[name] = control.value; search(); } });
    return control;
  };
  const controls = el("div", { className: "controls" });

  function showControls() {
    const follows = wish.prompt ? el("button", { onclick: () => { wish.prompt = ""; wish.order = "newest"; showControls(); search(); } }, "all prompts") : null;
    controls.replaceChildren(...[
      runChoice(run, (value) => { run = value; search(); }),
      field("samples of", choice([["rollout", "training"], ["validation", "validation"]], wish.kind, (value) => { wish.kind = value; search(); })),
      field("text in prompt or answer", input("text", { type: "search", size: 24 })),
      field("reward from", input("lowest", { className: "short", inputMode: "decimal" })),
      field("to", input("highest", { className: "short", inputMode: "decimal" })),
      field("step from", input("first", { className: "short", inputMode: "numeric" })),
      field("to", input("last", { className: "short", inputMode: "numeric" })),
      field("order", choice([["newest", "last step first"], ["oldest", "first step first"]], wish.order, (value) => { wish.order = value; search(); })),
      el("button", { className: "main", onclick: search }, "search"), follows].filter(Boolean));
  }

  async function search() {
    list.replaceChildren();
    chart.replaceChildren();
    found.length = 0;
    next = null;
    await load(null);
  }

  async function load(after) {
    const mine = ++asked;
    more.disabled = true;
    state.textContent = "searching";
    const query = Object.entries(wish).filter(([name]) => name !== "order");
    let count = 0;
    do {
      const answer = await ask(run, "samples", [...query, ["ascending", String(wish.order === "oldest")], ["limit", PAGE], ["after", after ? after.join(",") : ""]])
        .catch((error) => { state.textContent = error.message; return null; });
      if (answer === null || mine !== asked) return;
      next = answer.next;
      after = next;
      count += answer.samples.length;
      found.push(...answer.samples);
      list.append(...answer.samples.map((sample) => sampleCard(run, sample, followPrompt)));
      if (!answer.steps) state.textContent = `this run has no samples here: set ${answer.setting} to a directory`;
      else state.textContent = next ? `${found.length} shown; looked as far as step ${answer.step} of ${answer.steps.join(" to ")}` : `${found.length} found in steps ${answer.steps.join(" to ")}`;
    } while (next && count < PAGE);
    more.disabled = false;
    more.hidden = !next;
    if (wish.prompt) showPromptChart(chart, found);
  }

  function followPrompt(sample) {
    Object.assign(wish, { prompt: sample.prompt_id, order: "oldest", text: "", lowest: "", highest: "", first: "", last: "" });
    showControls();
    search();
    scrollTo(0, 0);
  }

  showControls();
  place.append(controls, chart, list, more, state);
  search();
  return { end: () => { asked++; report(""); } };
}

function sampleCard(run, sample, followPrompt) {
  const answer = el("dd", {}, sample.output ?? "");
  const more = Object.entries(sample).filter(([name, value]) => !KNOWN.has(name) && value !== null && typeof value !== "object");
  const head = el("div", { className: "head" },
    el("span", { className: "tag" }, `step ${sample.step}`),
    sample.score === null ? el("span", { className: "tag warn" }, "not scored")
      : el("span", { className: `tag ${sample.score > 0 ? "good" : "bad"}` }, `reward ${short(sample.score)}`),
    sample.version === undefined ? null : el("span", { className: "tag" }, `weights ${sample.version}`),
    more.map(([name, value]) => el("span", { className: "tag" }, `${name} ${short(value)}`)),
    el("span", { className: "space" }),
    sample.id === undefined ? null : el("button", { onclick: (event) => showTokens(run, sample, answer, event.target) }, "tokens"),
    el("button", { onclick: () => followPrompt(sample) }, "follow this prompt"));
  const truth = sample.gts === null || sample.gts === undefined ? [] : [el("dt", {}, "truth"), el("dd", {}, String(sample.gts))];
  const pictures = (sample.images ?? []).filter((uri) => uri.startsWith("data:image/jpeg;base64,"));
  const shown = pictures.length ? [el("dt", {}, "images"), el("dd", { className: "images" }, pictures.map(pictureOf))] : [];
  return el("article", { className: "card sample" }, head,
    el("dl", {}, shown, el("dt", {}, "prompt"), el("dd", {}, sample.input ?? ""), el("dt", {}, "answer"), answer, truth));
}

/** Return a picture of a prompt; one of few pixels is enlarged. */
function pictureOf(src) {
  const onload = ({ target }) => target.classList.toggle("tiny", Math.max(target.naturalWidth, target.naturalHeight) < 64);
  return el("img", { src, onload, alt: "image of the prompt" });
}

async function showTokens(run, sample, answer, button) {
  const { tokens: record } = await ask(run, "tokens", [["step", sample.step], ["id", sample.id]]);
  button.disabled = true;
  if (record === null) {
    button.textContent = "tokens were not recorded";
    return;
  }
  button.textContent = "tokens";
  const tokens = record.tokens.map((text, i) => ({ text, mask: record.mask?.[i] ?? 1, old: record.old?.[i], rollout: record.rollout?.[i], advantage: record.advantage?.[i] }));
  const able = Object.entries(COLOURINGS).filter(([, [, value]]) => tokens.some((token) => Number.isFinite(value(token))));
  const paint = (name) => {
    const value = COLOURINGS[name][1], scale = scaleOf(tokens, value);
    answer.replaceChildren(legend(name), ...turnsOf(tokens, (token) => tokenSpan(token, value, scale)));
  };
  const legend = (name) => el("div", { className: "quiet" }, choice(able.map(([key, [title]]) => [key, title]), name, paint),
    ` largest ${short(Math.max(0, scaleOf(tokens, COLOURINGS[name][1]) - SAME))}; blue: negative, orange: positive; faint: masked`);
  const telling = able.find(([, [, value]]) => scaleOf(tokens, value) > SAME) ?? able[0];
  if (telling) paint(telling[0]);
}

const scaleOf = (tokens, value) => Math.max(SAME, ...tokens.map((token) => Math.abs(value(token))).filter(Number.isFinite));

/** Return the colour of a number between -1 and 1: blue below zero, orange above. */
export function colourOf(share) {
  const strength = Math.min(1, Math.abs(share)) * 0.75;
  return share < 0 ? `rgba(52, 120, 220, ${strength.toFixed(3)})` : `rgba(235, 130, 20, ${strength.toFixed(3)})`;
}

function tokenSpan(token, value, scale) {
  const shown = value(token);
  const facts = [["rollout log-prob", token.rollout], ["trainer log-prob", token.old], ["advantage", token.advantage], ["mask", token.mask]];
  return el("span", {
    className: token.mask ? "token" : "token masked",
    title: facts.filter(([, fact]) => fact !== undefined && fact !== null).map(([name, fact]) => `${name} ${short(fact)}`).join("\n"),
    style: { backgroundColor: Number.isFinite(shown) ? colourOf(shown / scale) : "transparent" },
  }, token.text);
}

/** Return the elements of the tokens; in blocks of policy and environment, if both wrote some. */
function turnsOf(tokens, elementOf) {
  const turns = [];
  for (const token of tokens) {
    if (!turns.length || !turns.at(-1)[0].mask !== !token.mask) turns.push([]);
    turns.at(-1).push(token);
  }
  if (turns.length < 2) return tokens.map(elementOf);
  return turns.map((turn) => {
    const calls = turn[0].mask ? callsIn(turn.map((token) => token.text).join("")) : [];
    const who = el("div", { className: "who" }, turn[0].mask ? "policy" : "environment", calls.map((call) => el("span", { className: "tag" }, `calls ${call}`)));
    return el("div", { className: turn[0].mask ? "turn" : "turn environment" }, who, ...turn.map(elementOf));
  });
}

/** Return the tool calls of a text, as name(arguments), in the formats of Hermes, Qwen and Mistral, and of Llama 3. */
function callsIn(text) {
  const blocks = [...text.matchAll(/<tool_call>(.*?)<\/tool_call>|\[TOOL_CALLS\]\s*(\[.*\])|^\s*(\{.*\})\s*$/gs)];
  return blocks.flatMap(([, hermes, mistral, llama]) => {
    try {
      return [JSON.parse(hermes ?? mistral ?? llama)].flat().filter((call) => call?.name)
        .map((call) => `${call.name}(${Object.entries(call.arguments ?? call.parameters ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ")})`);
    } catch {
      return [];  // not a call, or one that lacks its format
    }
  });
}

function showPromptChart(place, samples) {
  const steps = new Map();
  const scored = samples.filter((sample) => typeof sample.score === "number");
  for (const sample of scored) steps.set(sample.step, [...(steps.get(sample.step) ?? []), sample.score]);
  const points = [...steps].sort(([a], [b]) => a - b);
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  place.replaceChildren();
  if (points.length < 2) return;
  const box = el("div");
  place.append(el("section", { className: "card sample" }, el("h3", {}, "mean reward of this prompt by step"), box));
  new uPlot({
    width: box.clientWidth, height: 130, scales: { x: { time: false } }, legend: { show: false },
    series: [{}, { stroke: "#1f78c8", width: 1.6, points: { size: 6 } }],
  }, [points.map(([step]) => step), points.map(([, values]) => mean(values))], box);
}
