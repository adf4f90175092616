// Two adapters or versions side by side: one prompt, two streams.

import { events, listAdapters, request } from "./api.js";
import { attempt, el, field, keyed, number, percent, say, seconds, setText } from "./dom.js";

const EVENTS = { Accept: "text/event-stream" };
const SHADES = [0.9, 0.6, 0.3, 0.1]; // least probability of each shade of a token
const mode = el("select", {}, el("option", { value: "completion" }, "Completion"), el("option", { value: "chat" }, "Chat"));
const system = el("textarea", { rows: 2 });
const prompt = el("textarea", { rows: 4, required: true });
const tokens = el("input", { type: "number", min: 1, value: 64, required: true });
const temperature = el("input", { type: "number", min: 0, max: 2, step: "any", value: 0.8, required: true });
const seed = el("input", { type: "number", min: 0, step: 1, value: 1 });
const EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}';
const schema = el("textarea", { rows: 3, spellcheck: "false", placeholder: EXAMPLE });
const names = el("datalist", { id: "adapter-names" });
const run = el("button", { class: "first" }, "Generate");
const stop = el("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
const clear = el("button", { type: "button", onclick: () => sides.forEach((side) => side.clear()) }, "Clear");
const tip = el("div", { id: "tip", role: "tooltip", hidden: true });
const chosen = new WeakMap(); // of a token's element: its log-probabilities
let running = null;
let turn = 0;

class Side {
  constructor(name) {
    this.name = name;
    this.turns = [];
    this.target = el("input", { list: names.id, placeholder: "the base", autocomplete: "off", spellcheck: "false" });
    this.output = el("div", { class: "output", tabindex: 0, role: "group", "aria-label": `Output ${name}` });
    this.facts = el("p", { class: "quiet" }, "–");
    this.node = el("section", { "aria-label": `Side ${name}` }, field(`Adapter ${name}`, this.target, "name, name@version, or empty for the base"), this.output, this.facts);
  }

  clear() {
    this.turns = [];
    this.output.replaceChildren();
    setText(this.facts, "–");
  }

  async generate(body, signal) {
    const chat = body.messages !== undefined;
    if (!chat) this.clear();
    if (chat) this.turns.push(body.messages.at(-1));
    const messages = chat ? [...body.messages.slice(0, -1), ...this.turns] : undefined;
    const answer = el("p", { class: "answer" });
    if (chat) this.output.append(el("p", { class: "asked" }, body.messages.at(-1).content));
    this.output.append(answer);
    this.output.setAttribute("aria-busy", "true");
    let last = null;
    try {
      const adapter = this.target.value.trim() || undefined;
      const asked = { ...body, messages, adapter };
      const response = await request("/generate", { method: "POST", body: asked, headers: EVENTS, signal });
      for await (const chunk of events(response)) {
        answer.append(...(chunk.logprobs ?? []).map(token));
        last = chunk;
        this.output.scrollTop = this.output.scrollHeight;
      }
    } catch (error) {
      answer.append(el("em", { class: "bad" }, error.name === "AbortError" ? " stopped" : ` ${error.message}`));
    } finally {
      this.output.removeAttribute("aria-busy");
      if (chat) this.turns.push({ role: "assistant", content: answer.textContent });
    }
    if (!last?.usage) return;
    const rate = (last.usage.completion_tokens - 1) / (last.timing.e2e - last.timing.ttft);
    const facts = [last.adapter ? `${last.adapter}@${last.version}` : "base", `${last.usage.completion_tokens} tokens`];
    facts.push(`first after ${seconds(last.timing.ttft)}`, Number.isFinite(rate) && `${number(rate)} tokens/s`);
    setText(this.facts, [...facts, `seed ${last.seed}`, last.finish_reason].filter(Boolean).join(" · "));
  }
}

function token(found) {
  const shade = SHADES.findIndex((least) => Math.exp(found.logprob) >= least);
  const node = el("span", { class: `token p${shade < 0 ? SHADES.length : shade}`, tabindex: -1 }, found.text);
  chosen.set(node, found);
  return node;
}

/** Show a token's probability and alternatives beside it. */
function showTip(node) {
  const found = chosen.get(node);
  tip.hidden = !found;
  if (!found) return;
  const shown = (logprob) => ` ${percent(Math.exp(logprob))} (${number(logprob)})`;
  const row = (text, logprob, own) => el("li", { class: own && "own" }, el("code", {}, JSON.stringify(text)), shown(logprob));
  const others = found.top.filter((one) => one.token_id !== found.token_id);
  tip.replaceChildren(el("ul", {}, row(found.token, found.logprob, true), others.map((one) => row(one.token, one.logprob))));
  const box = node.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.bottom + tip.offsetHeight + 8 > window.innerHeight ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
}

/** The arrow keys walk from token to token. */
function walk(event) {
  if (event.key === "Escape") return showTip(null);
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by === undefined) return undefined;
  const all = [...event.currentTarget.querySelectorAll(".token")];
  const now = all.indexOf(document.activeElement);
  all[now < 0 ? 0 : Math.max(0, Math.min(all.length - 1, now + by))]?.focus();
  return event.preventDefault();
}

function body() {
  const found = { stream: true, logprobs: 5, max_tokens: Number(tokens.value), temperature: Number(temperature.value) };
  if (seed.value !== "") found.seed = Number(seed.value);
  if (schema.value.trim()) {
    try {
      found.structured_outputs = { json: JSON.parse(schema.value) };
    } catch (error) {
      throw new Error(`JSON schema: ${error.message}`);
    }
  }
  if (mode.value === "completion") return { ...found, prompt: prompt.value };
  const before = system.value.trim() ? [{ role: "system", content: system.value }] : [];
  return { ...found, messages: [...before, { role: "user", content: prompt.value }] };
}

async function generate(event) {
  event.preventDefault();
  await attempt(async () => {
    const asked = body();
    running = new AbortController();
    [run.disabled, stop.disabled] = [true, false];
    say("Generating.");
    await Promise.all(sides.map((side) => side.generate(asked, running.signal)));
    say("Both outputs are complete.");
  });
  [run.disabled, stop.disabled, running] = [false, true, null];
}

const sides = [new Side("A"), new Side("B")];
const systemField = field("System message", system);
mode.onchange = () => {
  systemField.hidden = mode.value !== "chat";
  sides.forEach((side) => side.clear());
};
for (const { output } of sides) {
  output.addEventListener("pointerover", (event) => showTip(event.target));
  output.addEventListener("pointerleave", () => showTip(null));
  output.addEventListener("focusin", (event) => showTip(event.target));
  output.addEventListener("focusout", () => showTip(null));
  output.addEventListener("keydown", walk);
}

export const playground = {
  title: "Playground",
  build() {
    systemField.hidden = true;
    const form = el("form", { class: "grid", onsubmit: generate }, field("Kind", mode), field("Max tokens", tokens), field("Temperature", temperature),
      field("Seed", seed, "empty: random"), systemField, el("div", { class: "wide" }, field("Prompt", prompt)),
      el("details", { class: "wide" }, el("summary", {}, "JSON schema"), field("The output follows this schema", schema)),
      el("p", { class: "buttons wide" }, run, stop, clear));
    const hint = el("p", { class: "quiet" }, "The darker a token, the less probable it was. Hover over one, or use the arrow keys in an output, for its probability and alternatives.");
    return [form, names, el("div", { class: "pair" }, sides.map((side) => side.node)), hint, tip];
  },
  hide: () => (running?.abort(), showTip(null)),
  show: () => (turn = 0),
  async tick() {
    if (turn++ % 10) return; // the names change rarely
    const found = await listAdapters();
    const refs = found.flatMap(({ id, version, newest }) => {
      const last = newest ?? version;
      return [id, ...Array.from({ length: Math.min(9, last) }, (_, at) => `${id}@${last - at}`)];
    });
    keyed(names, refs, (ref) => ref, (ref) => ({ node: el("option", { value: ref }) }));
  },
};
