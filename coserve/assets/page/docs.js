// The HTTP API, drawn from /openapi.json: routes by tag, fields, types, errors, and a curl command for each route.

import { get } from "./api.js";
import { attempt, el, table } from "./dom.js";

const BOUNDS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };
const SAMPLES = {
  prompt: "Today we", inputs: "Today we", max_tokens: 16, messages: [{ role: "user", content: "Hello" }],
  data: [{ prompt: "Hello", completion: " Ahoy!" }], purpose: "fine-tune", path: "/FOLDER/OR/FILE",
};
const WANTED = ["prompt", "max_tokens", "data"]; // in examples, required or not
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
    const given = of.default === undefined || of.default === null ? "" : JSON.stringify(of.default);
    body.append(
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, kind(of)),
        el("td", {}, schema.required?.includes(name) ? "required" : given), el("td", {}, of.description ?? "")),
    );
  }
  return node;
}

/** A value that fits a schema, as short as can be. */
function sample(schema, name, without = []) {
  if (name in SAMPLES) return SAMPLES[name];
  const of = follow(schema);
  if (of.anyOf || of.allOf) return sample((of.anyOf ?? of.allOf)[0], name, without);
  if (of.enum) return of.enum[0];
  if (of.properties) {
    const wanted = Object.keys(of.properties).filter((key) => of.required?.includes(key) || WANTED.includes(key));
    return Object.fromEntries(wanted.filter((key) => !without.includes(key)).map((key) => [key, sample(of.properties[key], key)]));
  }
  if (of.type === "array") return of.items ? [sample(of.items, name)] : [];
  if (of.type === "integer" || of.type === "number") return of.default ?? of.minimum ?? 1;
  if (of.type === "object") return {};
  return of.type === "boolean" ? true : name.toUpperCase();
}

const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;

/** The curl command of a route. */
function curl(method, path, operation) {
  const parts = [`curl -s${method === "get" ? "" : ` -X ${method.toUpperCase()}`} ${location.origin}${path.replace(/{(\w+)}/g, (_, name) => name.toUpperCase())}`];
  if (operation.security?.length !== 0 && sessionStorage.getItem("coserve-key")) parts.push('-H "Authorization: Bearer $COSERVE_API_KEY"');
  const body = operation.requestBody?.content ?? {};
  const form = body["multipart/form-data"]?.schema;
  if (body["application/json"]) {
    parts.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(sample(body["application/json"].schema, "")))}`);
  } else if (form) {
    for (const [name, value] of Object.entries(sample(form, ""))) if (name !== "file") parts.push(`-F ${quoted(`${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)}`);
    parts.push("-F file=@FILE");
  } else if (body["application/octet-stream"]) {
    parts.push("--data-binary @FILE");
  }
  return parts.join(" \\\n  ");
}

function content(of, what, name) {
  return Object.entries(of ?? {}).map(([media, { schema }]) => {
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
    el("pre", { tabindex: 0, role: "group", "aria-label": `Example of ${name}` }, curl(method, path, operation)),
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
