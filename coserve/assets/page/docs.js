// The HTTP API, drawn from /openapi.json: routes by tag, fields, types, errors, and a curl command for each route.

import { get } from "./api.js";
import { attempt, el, table } from "./dom.js";

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };
const SAMPLES = {
  prompt: "Today we", inputs: "Today we", input: "Today we", max_tokens: 16, messages: [{ role: "user", content: "Hello" }],
  data: [{ prompt: "Hello", completion: " Ahoy!" }], purpose: "fine-tune", path: "/DATA/ROOT/FOLDER", lora_path: "/DATA/ROOT/FOLDER",
};
const WANTED = { // fields that examples have although they are not required, by type
  GenerateRequest: ["prompt"], TokenizeRequest: ["prompt"], FinetuneRequest: ["data"], ImportRequest: ["path"], LoadLoraRequest: ["lora_path"],
  AdapterUpdate: ["pinned"], Quota: ["requests_per_minute"],
};
const UPLOADED = ["data", "path", "lora_path"]; // what stands in a file instead
let schemas = {};

const join = (parts, between) => parts.flatMap((part, at) => (at ? [between, part] : [part]));
const named = (ref) => ref.split("/").at(-1);
const follow = (schema) => (schema.$ref ? schemas[named(schema.$ref)] : schema);

/** A schema in words and links. */
function kind(schema) {
  if (schema.$ref) return [el("a", { href: `#type-${named(schema.$ref)}` }, named(schema.$ref))];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if (schema.anyOf) return join(schema.anyOf.map(kind), " or ").flat();
  if (schema.allOf) return join(schema.allOf.map(kind), " and ").flat();
  if (schema.type === "array") return ["list of ", kind(schema.items ?? {})].flat();
  if (schema.type === "object" && schema.additionalProperties) return ["object of ", kind(schema.additionalProperties)].flat();
  const bounds = Object.keys(BOUNDS).filter((name) => name in schema).map((name) => ` ${BOUNDS[name]} ${schema[name]}`);
  return [(schema.type ?? "any") + bounds.join(",")];
}

function fields(caption, schema) {
  const { body, node } = table(caption, "Field", "Type", "Default", "Meaning");
  for (const [name, of] of Object.entries(schema.properties)) {
    const given = (of.default ?? null) === null || typeof of.default === "object" ? "" : JSON.stringify(of.default);
    const meaning = of.description ?? of.anyOf?.find((each) => each.description)?.description ?? "";
    body.append(
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, kind(of)),
        el("td", {}, schema.required?.includes(name) ? "required" : given), el("td", {}, meaning)),
    );
  }
  return node;
}

/** The JSON types of a schema, and of a value. */
const types = (schema) => (follow(schema).anyOf ?? [follow(schema)]).map((each) => follow(each).type);
const typeOf = (value) => (Array.isArray(value) ? "array" : typeof value === "number" ? "integer" : typeof value);

/** A value that fits a schema, as short as can be. */
function sample(schema, name, without = []) {
  const of = follow(schema);
  const known = SAMPLES[name];
  if (name in SAMPLES && (of.enum?.includes(known) ?? types(schema).includes(typeOf(known)))) return known;
  if (of.anyOf || of.allOf) return sample((of.anyOf ?? of.allOf)[0], name, without);
  if (of.enum) return of.enum[0];
  if (of.properties) {
    const wanted = ["max_tokens", ...(of.required ?? []), ...(WANTED[of.title] ?? [])];
    const shown = Object.keys(of.properties).filter((key) => wanted.includes(key) && !without.includes(key));
    return Object.fromEntries(shown.map((key) => [key, sample(of.properties[key], key, without)]));
  }
  if (of.type === "array") return of.items ? [sample(of.items, name)] : [];
  if (of.type === "integer" || of.type === "number") return of.default ?? of.minimum ?? 1;
  if (of.type === "object") return {};
  return of.type === "boolean" ? true : name.toUpperCase();
}

const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;

/** The curl commands of a route: one for each type of body. */
function examples(method, path, operation) {
  const media = Object.values(operation.responses).flatMap((each) => Object.keys(each.content ?? {}));
  const flags = `-s${media.includes("text/event-stream") ? "N" : ""}${method === "get" ? "" : ` -X ${method.toUpperCase()}`}`;
  const first = [`curl ${flags} ${location.origin}${path.replace(/{(\w+)}/g, (_, name) => name.toUpperCase())}`];
  if (operation.security?.length !== 0 && sessionStorage.getItem("coserve-key")) first.push('-H "Authorization: Bearer $COSERVE_API_KEY"');
  if (media[0].startsWith("application/") && media[0] !== "application/json") first.push("-o FILE");
  const bodies = Object.entries(operation.requestBody?.content ?? {}).map(([type, { schema }]) => {
    if (type === "application/json") return [`-H 'Content-Type: ${type}'`, `-d ${quoted(JSON.stringify(sample(schema, "")))}`];
    const parts = Object.entries(sample(schema, "", UPLOADED)).filter(([name]) => name !== "file");
    const texts = parts.map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
    return [...texts.map((text) => `-F ${quoted(text)}`), "-F file=@FILE"];
  });
  return (bodies.length ? bodies : [[]]).map((body) => [...first, ...body].join(" \\\n  "));
}

function content(of, what, name) {
  return Object.entries(of ?? {}).map(([media, { schema: given }]) => {
    const schema = given.properties?.data?.contentSchema ?? given; // of an event: its data
    const whole = follow(schema);
    const shown = name && whole.properties ? fields(`Body of ${name}, ${media}`, whole) : null;
    return [el("p", {}, `${what}, ${media}: `, kind(schema)), shown];
  }).flat();
}

/** What a route takes and answers; made when it is opened first. */
function details(method, path, operation) {
  const name = `${method.toUpperCase()} ${path}`;
  const { parameters = [], requestBody, responses } = operation;
  const taken = Object.fromEntries(parameters.map((each) => [`${each.name} (${each.in})`, { description: each.description, ...each.schema }]));
  const required = parameters.filter((each) => each.required).map((each) => `${each.name} (${each.in})`);
  const good = Object.entries(responses).filter(([status]) => status < 400);
  const bad = Object.entries(responses).filter(([status]) => status >= 400);
  return [
    examples(method, path, operation).map((text) => el("pre", { tabindex: 0, role: "group", "aria-label": `Example of ${name}` }, text)),
    parameters.length ? fields(`Parameters of ${name}`, { properties: taken, required }) : null,
    content(requestBody?.content, "Body", name),
    good.map(([status, each]) => content(each.content, status)),
    el("p", {}, "Errors: ", bad.map(([status]) => status).join(", "), ", as ", kind(bad[0][1].content["application/json"].schema)),
    operation.security?.length === 0 ? el("p", {}, "Needs no key.") : null,
  ].flat(2);
}

/** A part that is filled when it is opened first. */
function folded(props, heading, make) {
  const node = el("details", props, el("summary", {}, heading));
  node.addEventListener("toggle", () => node.children.length > 1 || node.append(...make().filter((child) => child)));
  return node;
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName !== "DETAILS") return;
  target.open = true;
  target.scrollIntoView();
  target.firstElementChild.focus();
}

function draw(api) {
  schemas = api.components.schemas;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const heading = [el("b", {}, method.toUpperCase()), ` ${path} `, el("span", {}, operation.summary)];
      const node = folded({ id: operation.operationId, class: "route" }, heading, () => details(method, path, operation));
      const tag = operation.tags?.[0] ?? "Other";
      groups.set(tag, [...(groups.get(tag) ?? []), node]);
    }
  }
  const types = Object.entries(schemas).map(([name, schema]) =>
    folded({ id: `type-${name}`, class: "type" }, [name], () => [
      schema.description ? el("p", {}, schema.description) : null,
      schema.properties ? fields(`Fields of ${name}`, schema) : el("p", {}, kind(schema)),
    ]));
  groups.set("Types", types);
  const parts = [...groups].map(([tag, nodes]) => el("section", { "aria-label": tag }, el("h2", { id: `group-${tag.replaceAll(" ", "-")}` }, tag), nodes));
  document.getElementById("routes").replaceChildren(...parts);
  document.getElementById("groups").append(...[...groups.keys()].map((tag) => el("a", { href: `#group-${tag.replaceAll(" ", "-")}` }, tag)));
  document.getElementById("filter").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const node of document.querySelectorAll("details.route")) {
      node.hidden = !words.every((word) => node.firstElementChild.textContent.toLowerCase().includes(word));
    }
  });
  addEventListener("hashchange", openTarget);
  openTarget();
}

document.querySelector("#error button").addEventListener("click", () => (document.getElementById("error").hidden = true));
await attempt(async () => draw(await get("/openapi.json")));
