// Adapters: versions, aliases, size, provenance, where they lie; roll back, delete, download.

import { get, listAdapters, request, send } from "./api.js";
import { attempt, bytes, confirmed, el, keyed, moment, number, percent, say, setText, table, textRow } from "./dom.js";

const SHOWN = 20; // newest versions of an adapter
let opened = "";
let searched = "";
let turn = 0;
const search = el("input", { type: "search", "aria-label": "Search adapters by name", placeholder: "Search by name" });
search.oninput = () => attempt(() => adapters.tick());
const list = table("Adapters by name", "Name", "Current", "Newest", "Rank", "Size", "Made by", "Base", "Lies in");
const panel = el("div", { hidden: true });
const title = el("h2", { tabindex: -1 });
const versions = table("Versions", "Version", "Aliases", "Made by", "Continues", "Made at", "Rank", "Size", "Lies in", "SHA-256", "Actions");
panel.append(title, versions.node);

const beside = (a) => (a.prefix_tokens ? ` + ${number(a.prefix_tokens)} tokens` : "");
const shape = (a) =>
  number(a.rank) + (a.cartridge ? " tokens" : a.bd_blocks > 1 ? ` in ${a.bd_blocks} blocks` : beside(a));
const place = (adapter) => (adapter.resident ? "memory" : "disk");

function makeRow({ id }) {
  const row = textRow(el("a", { href: `#adapters/${encodeURIComponent(id)}` }, id), 7);
  const update = (a) => row.write(`@${a.version}`, `@${a.newest ?? a.version}`, shape(a), bytes(a.bytes), a.source, a.base, place(a));
  return { node: row.node, update };
}

async function download(ref) {
  const blob = await (await request(`/adapters/${encodeURIComponent(ref)}/download`, { headers: { Accept: "application/x-tar" } })).blob();
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: `${ref.replace("/", "+").replace("@", "-")}.tar` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
  say(`Downloaded ${ref}.`);
}

async function rollBack({ id, version, ref }) {
  await send("POST", `/adapters/${encodeURIComponent(id)}/rollback`, { version });
  say(`${id} means ${ref} now.`);
  await adapters.tick();
}

async function remove({ ref }) {
  if (!(await confirmed(`Delete ${ref}? Its files are deleted.`))) return;
  await send("DELETE", `/adapters/${encodeURIComponent(ref)}`);
  say(`Deleted ${ref}.`);
  title.focus();
  await adapters.tick();
}

function makeVersion(first) {
  let adapter = first;
  const button = (label, action) => {
    const onclick = () => attempt(() => action(adapter));
    return el("button", { type: "button", "aria-label": `${label} ${first.ref}`, onclick }, label);
  };
  const back = button("Make current", rollBack);
  const name = el("span");
  const buttons = [button("Download", ({ ref }) => download(ref)), back, button("Delete", remove)];
  const row = textRow(name, 8, el("td", { class: "buttons" }, buttons));
  const update = (a) => {
    adapter = a;
    setText(name, `@${a.version}${a.current ? " (current)" : ""}`);
    row.write(a.aliases || "–", a.source, a.parent ?? "–", moment(a.created_at), shape(a), bytes(a.bytes), place(a), a.sha256.slice(0, 12));
    row.cells[7].title = a.sha256;
    back.hidden = a.current;
  };
  return { node: row.node, update };
}

/** The aliases that mean a version, or send it a share of their requests. */
const aliasesOf = (ref, aliases) => aliases.flatMap(({ name, target, canary, weight }) => [
  ...(target === ref ? [name] : []), ...(canary === ref ? [`${name} (canary, ${percent(weight)})`] : [])]).join(", ");

async function showVersions() {
  const id = opened;
  const missing = (error) => (error.status === 404 ? null : Promise.reject(error));
  const whole = id && await get(`/adapters/${encodeURIComponent(id)}`).catch(missing);
  if (id !== opened) return;
  if (!whole) {
    panel.hidden = true;
    return;
  }
  const numbers = whole.versions.slice(-SHOWN).reverse();
  const [{ data: aliases }, ...found] = await Promise.all(
    ["/aliases", ...numbers.map((version) => `/adapters/${encodeURIComponent(`${id}@${version}`)}`)].map(get));
  if (id !== opened) return;
  for (const one of found) one.aliases = aliasesOf(one.ref, aliases);
  setText(title, `${id}: ${whole.versions.length} version${whole.versions.length > 1 ? "s" : ""}`);
  keyed(versions.body, found, (one) => one.ref, makeVersion);
  panel.hidden = false; // only now: a heading without text confuses screen readers
}

export const adapters = {
  title: "Adapters",
  build: () => [el("p", {}, search), list.node, panel],
  show: (argument) => ([opened, turn] = [argument, 0]),
  async tick(health) {
    if (health && turn++ % 3) return; // asked for less often than the daemon's state
    const text = search.value.trim();
    const found = await listAdapters(text);
    if (text !== searched) say(`${found.length} adapters`);
    searched = text;
    keyed(list.body, found, (one) => one.id, makeRow);
    await showVersions();
  },
};
