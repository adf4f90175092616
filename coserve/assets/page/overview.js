// What the daemon does: state, requests, latency against targets, memory, and how the policy divides the time.

import { get, request } from "./api.js";
import { Chart } from "./chart.js";
import { clock, el, field, keyed, number, percent, seconds, setText, table, textRow } from "./dom.js";
import { buckets, parseMetrics, quantile, shareWithin, total } from "./metrics.js";

const GIB = 2 ** 30;
const WINDOW = 15 * 60;
const RECENT = 30; // readings of the metrics: about a minute
const PARTS = ["weights", "pages", "graphs", "jobs", "temporary", "cached", "context", "others", "free"];
const LATENCIES = [
  ["Time to first token", "coserve_time_to_first_token_seconds", "slo_ttft"],
  ["Between tokens", "coserve_inter_token_latency_seconds", "slo_tpot"],
  ["In the queue", "coserve_request_queue_time_seconds", null],
  ["Whole request", "coserve_e2e_request_latency_seconds", null],
];

let points = [];
let health = null;
const readings = [];
const tiles = el("dl", { class: "tiles" });
const notes = el("ul", { class: "notes" });
const windows = [["start", "since the daemon started"], ["recent", "the last minute"]];
const span = el("select", {}, windows.map(([value, text]) => el("option", { value }, text)));
const latency = table("Latency percentiles", "Latency", "p50", "p95", "p99", "Target", "Within target");
const rows = LATENCIES.map(([name]) => textRow(name, 5));
latency.body.append(...rows.map((row) => row.node));
const shares = new Chart("Time of the engine, by what the policy chose", { x: clock, y: percent, stacked: true, top: 1 });
const rates = new Chart("Steps a second", { x: clock });
const queue = new Chart("Requests and jobs", { x: clock, held: true });
const memory = new Chart("GPU memory", { x: clock, stacked: true, height: 220 });

/** Rates between two reports: `[[to, rate, from], ...]`; none where counters fell, since an engine was started again. */
function changes(of) {
  const found = [];
  for (let at = 1; at < points.length; at++) {
    const [a, b] = [points[at - 1], points[at]];
    const change = of(b) - of(a);
    if (change >= 0 && b.at - a.at > 0.2) found.push([b.at, change / (b.at - a.at), a.at]);
  }
  return found;
}

const line = (name, of) => ({ name, points: points.map((point) => [point.at, of(point)]) });

/** `now`: of the daemon's clock, as the points' times. */
function draw(now) {
  const range = [Math.max(now - WINDOW, Math.min(points[0]?.at ?? now, now - 60)), now];
  const serving = changes((p) => p.serve_seconds).map(([x, y, from]) => [x, Math.min(1, y), from]);
  const served = new Map(serving);
  const training = changes((p) => p.train_seconds).map(([x, y, from]) => [x, Math.min(1 - (served.get(x) ?? 0), y), from]);
  const pair = (first, second, name) => [{ name: "generation steps", points: first }, { name, points: second }];
  shares.update(pair(serving, training, "training slices"), range);
  rates.update(pair(changes((p) => p.generation_steps), changes((p) => p.training_batches), "training batches"), range);
  queue.update([line("running", (p) => p.running), line("waiting", (p) => p.waiting), line("jobs", (p) => p.jobs)], range);
  const planned = points.some((point) => Object.keys(point.memory).length);
  memory.y = planned ? (gib) => `${number(gib)} GiB` : number;
  memory.name(planned ? "GPU memory by component" : "Page pool, in pages (memory is not planned on this device)");
  memory.update(planned
    ? PARTS.map((name) => line(name, (p) => (p.memory[name] ?? 0) / GIB))
    : [line("keys and values", (p) => Math.max(0, p.pages_used - p.pages_adapters)), line("adapters", (p) => p.pages_adapters),
      { ...line("free", (p) => p.pages_total - Math.max(p.pages_used, p.pages_adapters)), color: PARTS.length - 1 }], range);
}

function drawLatency() {
  const before = span.value === "recent" ? readings[0] : null;
  LATENCIES.forEach(([, metric, slo], at) => {
    const counts = buckets(readings.at(-1), metric, before);
    const target = health[slo];
    const within = target ? shareWithin(target, counts) : null;
    const found = [0.5, 0.95, 0.99].map((q) => seconds(quantile(q, counts)));
    rows[at].write(...found, target ? seconds(target) : "–", within === null ? "–" : percent(within));
    rows[at].cells[4].className = within === null ? "" : within >= 0.95 ? "good" : "bad";
  });
}

function drawTiles() {
  const now = readings.at(-1);
  const before = readings.at(-2) ?? now;
  const passed = (now.at - before.at) / 1000 || 1;
  const rate = (name) => number(Math.max(0, (total(now, name) - total(before, name)) / passed));
  const base = health.base;
  const facts = [
    ["State", health.status],
    ["Base", base ? `${base.name} (${base.family}, ${base.dtype})` : "–"],
    ["Device", base ? `${base.device}${health.tp > 1 ? ` × ${health.tp}` : ""}` : "–"],
    ["Policy", health.policy ?? "–"],
    ["Up for", seconds(health.uptime)],
    ["Running", number(health.running)],
    ["Waiting", number(health.waiting)],
    ["Jobs", number(health.jobs)],
    ["Adapters in memory", number(health.adapters_resident)],
    ["Generated tokens/s", rate("coserve_generation_tokens_total")],
    ["Trained tokens/s", rate("coserve_train_tokens_total")],
    ["Requests ended", number(total(now, "coserve_requests_total"))],
    ["Refused or shed", number(total(now, "coserve_requests_refused_total") + total(now, "coserve_requests_shed_total"))],
    ["Engine restarts", number(health.engine_restarts)],
  ];
  keyed(tiles, facts, ([name]) => name, ([name]) => {
    const value = el("dd");
    return { node: el("div", {}, el("dt", {}, name), value), update: ([, text]) => setText(value, text) };
  });
  keyed(notes, health.notes, (text) => text, (text) => ({ node: el("li", {}, text) }));
}

export const overview = {
  title: "Overview",
  build: () => [
    tiles, notes,
    el("div", { class: "charts" }, shares.node, rates.node, queue.node, memory.node),
    el("h2", {}, "Latency"), field("Window", span), latency.node,
    el("p", { class: "quiet" }, "Interpolated within the buckets of the metrics' histograms. Targets are those of interactive requests that bring none."),
  ],
  async tick(found) {
    health = found;
    const [history, text] = await Promise.all([
      get(`/history?after=${points.at(-1)?.at ?? 0}`),
      request("/metrics", { headers: { Accept: "text/plain" } }).then((response) => response.text()),
    ]).catch((error) => {
      if (error.status !== 403) throw error; // a key without the scope admin: only /health is shown
      health = { ...found, notes: [...found.notes, error.message] };
      return [{ data: [], now: Date.now() / 1000 }, ""];
    });
    points = [...points, ...history.data].filter(({ at }) => at > history.now - WINDOW && at <= history.now);
    readings.push(Object.assign(parseMetrics(text), { at: performance.now() }));
    if (readings.length > RECENT) readings.shift();
    drawTiles();
    drawLatency();
    draw(history.now);
  },
};
span.onchange = drawLatency;
