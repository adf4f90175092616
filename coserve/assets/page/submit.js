// The form that starts a job from a file, chosen or dropped.

import { events, request } from "./api.js";
import { attempt, el, field, percent, say, setText } from "./dom.js";

const input = (props) => el("input", props);
const file = input({ type: "file", accept: ".jsonl,.json,.csv,.parquet", required: true });
const adapter = input({ required: true, pattern: "[a-z0-9][a-z0-9_\\-]*(/[a-z0-9][a-z0-9_\\-]*)?", autocomplete: "off", spellcheck: "false" });
const epochs = input({ inputmode: "decimal", placeholder: "auto" });
const rate = input({ inputmode: "decimal", placeholder: "auto" });
const rank = input({ type: "number", min: 1, max: 512, placeholder: "default" });
const held = input({ type: "number", min: 0, max: 0.9, step: "any", placeholder: "0" });
const prompts = el("textarea", { rows: 2, spellcheck: "false" });
const every = input({ type: "number", min: 1, placeholder: "20" });
const more = el("textarea", { rows: 2, spellcheck: "false", placeholder: '{"steps": 100, "batch_tokens": 512}' });
const status = el("output");
const start = el("button", { class: "first" }, "Start the job");

/** The settings of `POST /finetune`; fields that are left empty are the daemon's to choose. */
function settings() {
  const training = {};
  const put = (name, control) => control.value.trim() && (training[name] = Number(control.value));
  put("epochs", epochs);
  put("learning_rate", rate);
  put("validation_split", held);
  put("sample_steps", every);
  const texts = prompts.value.split("\n").filter((text) => text.trim());
  if (texts.length) training.sample_prompts = texts;
  let others = {};
  try {
    others = more.value.trim() ? JSON.parse(more.value) : {};
  } catch (error) {
    throw new Error(`Further settings: ${error.message}`);
  }
  const found = { adapter: adapter.value, training: { ...training, ...others } };
  if (rank.value) found.lora = { r: Number(rank.value) };
  return found;
}

async function submit(started) {
  const form = new FormData();
  form.append("settings", JSON.stringify(settings()));
  form.append("file", file.files[0]);
  const response = await request("/finetune", { method: "POST", body: form, headers: { Accept: "text/event-stream" } });
  for await (const { preparing, job } of events(response)) {
    if (preparing) setText(status, `tokenising: ${preparing.rows} rows, ${percent(preparing.progress)}`);
    if (job) {
      setText(status, `${job.id} is ${job.state}`);
      say(`Started job ${job.id}.`);
      started(job);
    }
  }
}

function chosen() {
  const name = file.files[0]?.name ?? "";
  if (name && !adapter.value) adapter.value = name.replace(/\.[^.]*$/, "").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "");
  setText(status, name && `${name} is chosen`);
}

/** `started` gets the job. */
export function submitForm(started) {
  const drop = el("div", { class: "drop" }, field("Training data", file, "JSON Lines, JSON, CSV or parquet. A file can be dropped here."));
  const over = (on) => (event) => (event.preventDefault(), drop.classList.toggle("over", on));
  drop.addEventListener("dragover", over(true));
  drop.addEventListener("dragleave", over(false));
  drop.addEventListener("drop", (event) => {
    over(false)(event);
    if (event.dataTransfer.files.length) (file.files = event.dataTransfer.files), chosen();
  });
  file.onchange = chosen;
  const form = el("form", { class: "grid" },
    drop, field("Adapter", adapter, "A new name, or one that gets a new version."), field("Epochs", epochs), field("Learning rate", rate),
    field("LoRA rank", rank), field("Share held back for validation", held), field("Sample prompts, one a line", prompts),
    field("Sample every … steps", every), field("Further settings of training, as JSON", more),
    el("p", { class: "buttons" }, start, status));
  form.onsubmit = async (event) => {
    event.preventDefault();
    start.disabled = true;
    await attempt(() => submit(started));
    start.disabled = false;
  };
  return el("details", { open: true }, el("summary", {}, "Start a job from a file"), form);
}
