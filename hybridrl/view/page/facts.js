// Settings, failures and roles, graph and ledger: tables.

import { ask, el, field, shownRuns, state, table } from "./core.js";

const MAX_EVENTS = 300; // shown at once

/** Return a function that shows the newest answer for all shown runs, and again after changes, at most every 3 s. */
function refreshed(place, view, shown) {
  let timer = null;
  let ended = false;
  async function load() {
    const runs = shownRuns();
    const answers = await Promise.all(runs.map((run) => ask(run, view)));
    if (!ended) shown(runs.map((run, i) => [run, answers[i]]));
  }
  load();
  return {
    changed: () => { timer ??= setTimeout(() => { timer = null; load(); }, 3000); },
    end: () => { ended = true; clearTimeout(timer); },
  };
}

const runName = (run) => el("h2", {}, el("span", { className: "key", style: { background: state.colours.get(run), marginLeft: "0" } }), run);

// -- settings

export function showSettings(place) {
  const wish = { text: "", all: false };
  const area = el("div");
  let found = [];
  const text = el("input", { type: "search", placeholder: "rollout.n", oninput: () => { wish.text = text.value; draw(); } });
  const all = el("input", { type: "checkbox", onchange: () => { wish.all = all.checked; draw(); } });
  place.append(el("div", { className: "controls" }, field("settings with", text),
    el("label", { className: "row" }, all, "also those that are the default in every run")), area);

  function draw() {
    const names = new Map(); // setting -> run -> row
    for (const [run, answer] of found) {
      for (const row of answer.settings) names.set(row.name, (names.get(row.name) ?? new Map()).set(run, row));
    }
    const runs = found.map(([run]) => run);
    const rows = [];
    for (const [name, byRun] of [...names].sort(([a], [b]) => (a < b ? -1 : 1))) {
      const values = runs.map((run) => byRun.get(run));
      const differ = new Set(values.filter(Boolean).map((row) => row.value)).size > 1;
      if (!name.includes(wish.text) || (!wish.all && !differ && !values.some((row) => row?.differs))) continue;
      const known = values.find(Boolean);
      rows.push([el("code", {}, name), ...values.map((row) => el("code", { className: row?.differs ? "differs" : "" }, row?.value ?? "–")),
        el("code", { className: "quiet" }, known.default ?? "no default"), differ && runs.length > 1 ? el("span", { className: "tag warn" }, "differ") : ""]);
    }
    const sources = found.map(([run, answer]) => `${run}: ${answer.source}`).join("; ");
    area.replaceChildren(table(["setting", ...runs, "default", ""], rows), el("p", { className: "quiet" }, `${rows.length} settings shown; read from ${sources}`),
      ...found.filter(([, answer]) => answer.command.length).map(([run, answer]) => el("details", {}, el("summary", {}, `command of ${run}`), el("p", { className: "mono" }, answer.command.join(" ")))));
  }
  return refreshed(place, "settings", (answers) => { found = answers; draw(); });
}

// -- failures and roles

const KINDS = { WorkerFailed: "bad", WorkerSilent: "warn", WarningRaised: "warn", RecoveryDecided: "good", WorkerRecovered: "good", WorkerJoined: "" };

export function showFailures(place) {
  const area = el("div");
  place.append(area);
  return refreshed(place, "failures", (answers) => area.replaceChildren(...answers.flatMap(([run, answer]) => failuresOf(run, answer))));
}

function failuresOf(run, { journals, recoveries }) {
  const parts = [runName(run)];
  if (!journals.length && !recoveries.length) return [...parts, el("p", { className: "empty card" }, "no journal of a master and no failure: runs with trainer.backend=local have no master")];
  if (recoveries.length) {
    const rows = recoveries.slice(-MAX_EVENTS).reverse().map((one) => [time(one.detected_at), one.step, (one.lost ?? []).join(", "), one.method ?? "–", one.back_at_step, one.seconds]);
    parts.push(el("h2", {}, `Steps that were repeated: ${recoveries.length}`), table(["when", "in step", "lost", "in call", "went back to the end of", "seconds"], rows));
  }
  for (const journal of journals) parts.push(...journalParts(journal));
  return parts;
}

function journalParts(journal) {
  const commit = journal.commit_step === null ? "nothing committed" : `last commit at step ${journal.commit_step}`;
  const workers = journal.workers.map((worker) => [worker.slot, stateTag(worker.state), worker.pid, worker.restarts, worker.exit_reason || "–"]);
  const events = journal.events.slice(-MAX_EVENTS).reverse().map((event) => {
    const { at, at_step: step, event: kind, ...facts } = event;
    const words = Object.entries(facts).filter(([name]) => !["pid", "group_size", "rank"].includes(name)).map(([name, value]) => (["text", "evidence", "slot"].includes(name) ? value : `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`));
    return [time(at), step, el("span", { className: `tag ${KINDS[kind] ?? ""}` }, kind), words.join(" · ")];
  });
  return [
    el("h2", {}, `${journal.run} `, stateTag(journal.state)),
    el("p", { className: "quiet" }, `${journal.reason ? `${journal.reason}; ` : ""}step ${journal.step}, ${commit}`),
    journal.problem ? el("p", { className: "tag bad" }, journal.problem) : "",
    table(["process", "state", "pid", "restarts", "how it ended"], workers),
    el("h2", {}, "Events, the newest first"), table(["when", "after step", "event", ""], events),
  ];
}

const stateTag = (name) => el("span", { className: `tag ${["alive", "running", "succeeded"].includes(name) ? "good" : ["lost", "failed", "dead"].includes(name) ? "bad" : ""}` }, name);
const time = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString("sv-SE") : "–");

// -- graph and ledger

export function showLedger(place) {
  const area = el("div");
  const drawn = new Map(); // run -> picture, drawn once
  place.append(area);
  return refreshed(place, "ledger", (answers) => area.replaceChildren(...answers.flatMap(([run, ledger]) => {
    if (!drawn.has(run)) drawn.set(run, picture(run));
    return [runName(run), ledgerPart(ledger), drawn.get(run)];
  })));
}

function ledgerPart(ledger) {
  if (ledger.last_step === null && !ledger.starts.length) return el("p", { className: "card" }, "this run has no step ledger");
  const rows = [
    ["steps in the weights", ledger.steps], ["last step", ledger.last_step], ["steps that ran again after a process ended or went back", ledger.repeated],
    ["starts and returns", ledger.starts.length], ["prompts trained on", ledger.prompts], ["rows of the training data", ledger.rows],
    ...Object.entries(ledger.updates).map(([role, count]) => [`optimizer steps of the ${role}`, count]),
  ];
  const doubled = ledger.more_than_once.length ? el("p", { className: "tag bad" }, ledger.more_than_once.join("; ")) : el("p", { className: "tag good" }, "every stage that may run once ran once in each step");
  return el("div", { className: "two" }, el("div", {}, table(["step ledger", ""], rows), doubled),
    el("div", { className: "card" }, "Checksums and prompts are checked by ", el("br"), el("code", {}, ledger.command)));
}

function picture(run) {
  const note = el("p", { className: "quiet" }, "drawing the stages takes some seconds");
  const image = el("img", { className: "graph", alt: `stages of ${run}`, src: `/api/runs/${encodeURIComponent(run)}/graph.svg` });
  image.onload = () => { note.textContent = "What one step does, from the run's settings; without stages of trainer.middleware. As `hybridrl job graph` draws it."; };
  image.onerror = () => { image.remove(); note.textContent = "no graph: the settings are not those of PPO or its relatives, or they could not be read"; };
  return el("div", { className: "card gap" }, el("h2", {}, "Stages"), note, image);
}

