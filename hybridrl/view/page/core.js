// What all views of the page use: the runs that are shown, requests to the server, and how elements are made.
// Text of a run enters the page as text nodes only (`el`), never as HTML.

export const state = { runs: new Map(), shown: new Set(), colours: new Map() };

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
