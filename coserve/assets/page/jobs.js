// Jobs: start, steer, follow, compare two.

import { get, send } from "./api.js";
import { Chart } from "./chart.js";
import { attempt, clock, confirmed, el, keyed, moment, number, percent, say, seconds, setText, table, textRow } from "./dom.js";
import { Follower } from "./follow.js";
import { submitForm } from "./submit.js";

const MOST = 2; // jobs followed at once: browsers have few connections to a host
const ACTIONS = {
  pause: ["Pause", ["running", "queued"]],
  resume: ["Resume", ["paused"]],
  cancel: ["Cancel", ["running", "queued", "paused"]],
  delete: ["Delete", ["succeeded", "failed", "cancelled"]],
};
const CHARTS = [["Loss", "loss", false], ["Validation loss", "valid_loss", false], ["Trained tokens a second", "tokens_per_second", true],
  ["Learning rate", "learning_rate", true]];

let listed = [];
let followers = [];
let due = 0;
const list = table("Jobs, newest first", "Follow", "Job", "Adapter", "State", "Progress", "Loss", "Left", "Actions");
const panel = el("div", { hidden: true });
const title = el("h2", { tabindex: -1 });
const charts = CHARTS.map(([name, metric, zero]) => ({ metric, chart: new Chart(name, { zero }) }));
const details = el("div", { class: "pair" });
panel.append(title, el("div", { class: "charts" }, charts.map((one) => one.chart.node)), details);

function steer(name, id) {
  return attempt(async () => {
    if (name === "cancel" && !(await confirmed(`Cancel ${id}? What it learned is lost.`))) return;
    if (name === "delete" && !(await confirmed(`Delete the record of ${id}? Its adapter stays.`))) return;
    await (name === "delete" ? send("DELETE", `/finetune/${id}`) : send("POST", `/finetune/${id}/${name}`));
    say(`${id}: ${name} done.`);
    await jobs.tick();
  });
}

function makeRow({ id }) {
  const follow = el("input", { type: "checkbox", "aria-label": `Follow ${id}`, onchange: () => toggle(id, follow.checked) });
  const cells = Array.from({ length: 5 }, () => el("td"));
  const bar = el("progress", { max: 1, "aria-label": `Progress of ${id}` });
  const text = el("span");
  const buttons = Object.entries(ACTIONS).map(([name, [label, states]]) => {
    const button = el("button", { type: "button", "aria-label": `${label} ${id}`, onclick: () => steer(name, id) }, label);
    return { button, states };
  });
  cells[2].append(bar, " ", text);
  const node = el("tr", {}, el("td", {}, follow), el("th", { scope: "row" }, el("a", { href: `#jobs/${id}` }, id)), cells,
    el("td", { class: "buttons" }, buttons.map(({ button }) => button)));
  const update = (job) => {
    follow.checked = followers.some((one) => one.id === id);
    const why = job.waiting ?? job.error?.message;
    setText(cells[0], `${job.adapter}@${job.version}`);
    setText(cells[1], why ? `${job.state}: ${why}` : job.state);
    const { phase, done, total } = job.document ?? {};
    bar.value = total ? done / total : job.progress;
    setText(text, total ? `${phase} ${done}/${total}` : `${job.step}/${job.total_steps}`);
    setText(cells[3], number(job.loss));
    setText(cells[4], seconds(job.eta));
    for (const { button, states } of buttons) button.hidden = !states.includes(job.state);
  };
  return { node, update };
}

function toggle(id, on) {
  const others = followers.map((one) => one.id).filter((other) => other !== id);
  location.hash = `#jobs/${[...others, ...(on ? [id] : [])].slice(-MOST).join(",")}`;
}

function follow(ids) {
  for (const one of followers) if (!ids.includes(one.id)) one.stop();
  followers = ids.map((id) => followers.find((one) => one.id === id) ?? new Follower(id, (event) => changed(id, event)));
  panel.hidden = !ids.length;
  redraw();
}

/** `pirate@2`, once its job is listed. */
const nameOf = (id) => {
  const job = listed.find((each) => each.id === id);
  return job ? `${job.adapter}@${job.version}` : id;
};

function changed(id, event) {
  if (event.state && Date.now() / 1000 - event.created_at < 10) say(`${nameOf(id)}: ${event.state}`);
  if (!due) due = requestAnimationFrame(redraw);
}

function redraw() {
  due = 0;
  const names = followers.map((one) => nameOf(one.id));
  setText(title, names.length > 1 ? `Compare ${names.join(" and ")}` : `Follow ${names[0] ?? ""}`);
  for (const { metric, chart } of charts) {
    chart.update(followers.map((one, at) => ({ name: names[at], color: at, dashed: at > 0, points: one.series(metric) })));
    chart.node.hidden = metric === "valid_loss" && !chart.series.length;
  }
  keyed(details, followers, (one) => one.id, makeDetails);
}

const asText = (prompt) => (Array.isArray(prompt) ? prompt.map((message) => message.content).join(" / ") : prompt ?? "…");

/** What the settings of a job are; of two jobs, those that differ are marked. */
function facts(job) {
  const { rows, tokens, target_tokens, result, training, lora } = job;
  const found = Object.entries({ rows, tokens, target_tokens, result, created: moment(job.created_at), ...training });
  found.push(...Object.entries(lora).map(([name, value]) => [`lora.${name}`, value]));
  const text = (value) => (typeof value === "object" ? JSON.stringify(value) : `${value}`);
  return found.filter(([, value]) => value !== null).map(([name, value]) => [name, text(value)]);
}

function makeDetails({ id }) {
  const [head, state] = [el("h3"), el("p")];
  const samples = el("div", { class: "samples", role: "region", "aria-label": `Samples of ${id}`, tabindex: 0 });
  const log = el("ol", { class: "log", tabindex: 0, "aria-label": `Events of ${id}` });
  const settings = table(`Settings of ${id}`, "Setting", "Value");
  const test = table(`Test rows of ${id}`, "Model", "Rows", "Loss", "Tokens right", "Answers right");
  const measured = { adapter: textRow("adapter", 4), base: textRow("base", 4) };
  test.body.append(measured.adapter.node, measured.base.node);
  const node = el("section", { "aria-label": id },
    head, state, test.node, el("h4", {}, "Samples"), samples, el("h4", {}, "Events"), log,
    el("details", {}, el("summary", {}, "Settings"), settings.node));
  const update = (one) => {
    const last = one.steps.at(-1);
    const job = listed.find((each) => each.id === id);
    test.node.hidden = !job?.test;
    for (const [name, { rows, loss, token_accuracy, match }] of Object.entries(job?.test ?? {})) {
      measured[name].write(number(rows), number(loss), percent(token_accuracy), match === null ? "–" : percent(match));
    }
    setText(head, `${nameOf(id)} (${id})`);
    samples.hidden = samples.previousElementSibling.hidden = !one.samples.size;
    setText(state, [one.state ?? "…", last && `step ${last.step} of ${last.total_steps}, loss ${number(last.loss)}`,
      last?.token_accuracy && `${percent(last.token_accuracy)} of tokens right`, ...(job?.notes ?? [])].filter(Boolean).join(" · "));
    const shown = [...one.samples.values()].sort((a, b) => b.step - a.step || a.prompt - b.prompt).slice(0, 20)
      .map((sample) => ({ ...sample, asked: asText(job?.training.sample_prompts[sample.prompt]) }));
    keyed(samples, shown, (sample) => `${sample.step}.${sample.prompt}`, (sample) => {
      const head = el("figcaption");
      const update = ({ step, asked }) => setText(head, `step ${step}: ${asked}`);
      return { node: el("figure", {}, head, el("blockquote", {}, sample.text || "(nothing)")), update };
    });
    keyed(log, one.log.slice(-50), (event) => event.seq, (event) => ({ node: el("li", { class: event.level }, `${clock(event.created_at)} ${event.message || event.state}`) }));
    if (!job) return;
    const other = listed.find((each) => each.id !== id && followers.some((follower) => follower.id === each.id));
    const theirs = new Map(other ? facts(other) : []);
    keyed(settings.body, facts(job), ([name, value]) => `${name}=${value}=${theirs.get(name)}`, ([name, value]) => {
      const differs = other && theirs.get(name) !== value;
      const head = el("th", { scope: "row" }, differs ? `${name} (differs)` : name);
      return { node: el("tr", { class: differs && "differs" }, head, el("td", {}, value)) };
    });
  };
  return { node, update };
}

export const jobs = {
  title: "Jobs",
  build: () => [submitForm((job) => (location.hash = `#jobs/${job.id}`)), list.node, panel],
  show: (argument) => follow(argument.split(",").filter(Boolean).slice(0, MOST)),
  hide: () => follow([]),
  async tick() {
    listed = (await get("/finetune?limit=100")).data;
    keyed(list.body, listed, (job) => job.id, makeRow);
    if (!due) due = requestAnimationFrame(redraw);
  },
};
