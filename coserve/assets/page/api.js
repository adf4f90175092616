// Requests to the daemon, with the key that the user gave, and server-sent events.

import { ask, setText } from "./dom.js";

const STORED = "coserve-key";
let asking = null;
let declined = false;

export class ApiError extends Error {
  constructor(status, { code, message, field, line } = {}) {
    const where = [field && `in ${field}`, line && `line ${line}`].filter(Boolean).join(", ");
    super(`${message ?? `the daemon answered ${status}`}${where ? ` (${where})` : ""}`);
    this.status = status;
    this.code = code;
  }
}

/** Ask for the key; false if the user declines. Several requests that are refused at once ask once. */
export function askKey(why) {
  asking ??= (async () => {
    const dialog = document.getElementById("key-dialog");
    const input = dialog.querySelector("input");
    setText(dialog.querySelector("#key-why"), why);
    input.value = "";
    const given = await ask(dialog);
    declined = !given;
    if (given) sessionStorage.setItem(STORED, input.value);
    asking = null;
    return given;
  })();
  return asking;
}

/** The response of a request that succeeds. Raises `ApiError`, and `TypeError` if the daemon does not answer. */
export async function request(path, { method = "GET", body, headers = {}, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const sent = { Accept: "application/json", ...headers };
    if (key) sent.Authorization = `Bearer ${key}`;
    const json = body !== undefined && !(body instanceof FormData);
    if (json) sent["Content-Type"] = "application/json";
    const response = await fetch(path, { method, headers: sent, body: json ? JSON.stringify(body) : body, signal });
    if (response.ok) return response;
    const found = await response.json().catch(() => ({}));
    if (response.status === 401 && sessionStorage.getItem(STORED) !== key) continue; // given meanwhile
    if (response.status === 401 && !declined) {
      const why = key ? "The daemon refuses this key." : "This daemon asks for a key. It is kept in this tab only.";
      if (await askKey(why)) continue;
    }
    throw new ApiError(response.status, found.error);
  }
}

export const get = async (path) => (await request(path)).json();
export const send = async (method, path, body) => (await request(path, { method, body })).json();

/** The data of a response's server-sent events, as objects. An `event: error` raises `ApiError`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (data === undefined || data === "[DONE]") continue;
      const found = JSON.parse(data);
      if (lines.includes("event: error")) throw new ApiError(0, found.error);
      yield found;
    }
  }
}

/** `/health`, also while the daemon starts (503). Raises `TypeError` if it does not answer. */
export async function health() {
  const response = await fetch("/health");
  const found = await response.json();
  if (!found.status) throw new ApiError(response.status, found.error);
  return found;
}

/** Adapters by name, page by page, at most `limit`. `search`: part of the name. */
export async function listAdapters(search = "", limit = 1000) {
  const found = [];
  for (let after = ""; ; after = `&after=${encodeURIComponent(found.at(-1).id)}`) {
    const page = await get(`/adapters?limit=100&search=${encodeURIComponent(search)}${after}`);
    found.push(...page.data);
    if (!page.has_more || found.length >= limit) return found;
  }
}
