// Elements and formats. Texts become text nodes, never HTML.

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element; functions among `props` are listeners (`onclick`). */
export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

let labels = 0;
/** A label above a control. */
export function field(text, control, hint) {
  control.id ||= `field-${++labels}`;
  const note = hint && el("small", { id: `${control.id}-hint` }, hint);
  if (note) control.setAttribute("aria-describedby", note.id);
  return el("div", { class: "field" }, el("label", { for: control.id }, text), control, note);
}

/** A table in a region that scrolls; returns its body too. */
export function table(caption, ...columns) {
  const body = el("tbody");
  const head = el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name))));
  const whole = el("table", {}, el("caption", {}, caption), head, body);
  return { body, node: el("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 }, whole) };
}

/** A row that begins with `head`: its node, further cells, and what writes their texts. */
export function textRow(head, count, ...more) {
  const cells = Array.from({ length: count }, () => el("td"));
  const write = (...texts) => texts.forEach((text, at) => setText(cells[at], text));
  return { node: el("tr", {}, el("th", { scope: "row" }, head), cells, ...more), cells, write };
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Show one row an item, in order. Rows are kept by key, so that focus and what is typed stay. `make` returns a row:
 * `{node, update}`. */
const kept = new WeakMap();
export function keyed(parent, items, keyOf, make) {
  if (!kept.has(parent)) kept.set(parent, new Map());
  const rows = kept.get(parent);
  const keys = new Set(items.map(keyOf));
  for (const [key, row] of rows) if (!keys.has(key)) (row.node.remove(), rows.delete(key));
  items.forEach((item, at) => {
    const key = keyOf(item);
    if (!rows.has(key)) rows.set(key, make(item));
    const row = rows.get(key);
    row.update?.(item);
    if (parent.children[at] !== row.node) parent.insertBefore(row.node, parent.children[at] ?? null);
  });
}

/** Tell screen readers. */
export const say = (text) => setText(document.getElementById("live"), text);

export function showError(text) {
  const box = document.getElementById("error");
  setText(box.firstElementChild, text);
  box.hidden = !text;
}

/** Run an action of the user's; what goes wrong is shown. Returns undefined then. */
export async function attempt(action) {
  showError("");
  try {
    return await action();
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
    return undefined;
  }
}

/** Show a dialog until it is submitted (true) or left (false). */
export function ask(dialog) {
  const form = dialog.querySelector("form");
  const before = document.activeElement;
  return new Promise((resolve) => {
    const end = (answer) => (event) => {
      event.preventDefault();
      form.onsubmit = dialog.oncancel = null;
      dialog.close();
      before?.focus?.();
      resolve(answer);
    };
    form.onsubmit = end(true);
    dialog.oncancel = form.querySelector("button[type=button]").onclick = end(false);
    dialog.showModal();
  });
}

export function confirmed(text) {
  const dialog = document.getElementById("confirm");
  setText(dialog.querySelector("#confirm-text"), text);
  return ask(dialog);
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export const number = (x, digits = 3) =>
  x === null || x === undefined || Number.isNaN(x) ? "–"
    : Number.isInteger(x) ? x.toLocaleString("en") : Number(x.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = n < 1 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${number(n / 1024 ** at)} ${units[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${number(1000 * s)} ms`;
  if (s < 120) return `${number(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${number(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

export const percent = (x) => `${number(100 * x)} %`;
export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
export const moment = (at) => new Date(1000 * at).toLocaleString("en-GB");
