// /docs: the operations of /openapi.json, with the fields of their bodies and an example call.

import { getJson, setKey } from "./api.js";

const MAX_DEPTH = 3; // of nested types
const $ = (id) => document.getElementById(id);
const HIDDEN_NAMES = new Set(["title", "description", "default"]);

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function resolved(schema, document_) {
  const name = schema.$ref?.split("/").pop();
  return name ? document_.components.schemas[name] : schema;
}

// A schema on one line, such as "integer 1 to 128" or "list of text".
function typeText(given, document_, depth = 0) {
  const schema = resolved(given, document_);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) {
    const shown = choices.filter((one) => one.type !== "null");
    return [...new Set(shown.map((one) => typeText(one, document_, depth)))].join(" | ");
  }
  if (schema.type === "array") {
    return `list of ${schema.items && depth < MAX_DEPTH ? typeText(schema.items, document_, depth + 1) : "values"}`;
  }
  if (schema.type === "object") {
    const names = Object.keys(schema.properties ?? {});
    return names.length && depth < MAX_DEPTH ? `{${names.join(", ")}}` : "object";
  }
  const rules = Object.keys(schema).filter((name) => !HIDDEN_NAMES.has(name));
  if (!rules.length) return "anything";
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const range = low === undefined && high === undefined ? "" : ` ${low ?? ""} to ${high ?? ""}`;
  return `${schema.type === "string" ? "text" : (schema.type ?? "any")}${range}`;
}

function fieldTable(schema, document_) {
  const body = element("tbody");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const isRequired = (schema.required ?? []).includes(name);
    const fallback = "default" in field && field.default !== null ? JSON.stringify(field.default) : "";
    const type = typeText(field, document_);
    const note = field.description ?? (isRequired ? "required" : fallback);
    body.append(element("tr", "", element("td", "", name), element("td", "", type), element("td", "", note)));
  }
  const head = element("tr", "", ...["field", "value", "default"].map((word) => element("th", "", word)));
  return element("table", "", element("thead", "", head), body);
}

// The smallest value that a schema accepts, for an example.
function example(given, document_, depth = 0) {
  const schema = resolved(given, document_);
  if ("const" in schema) return schema.const;
  if (schema.enum) return schema.enum.find((one) => one !== null);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return example(choices[0], document_, depth);
  if (schema.type === "array") return depth > MAX_DEPTH ? [] : [example(schema.items ?? {}, document_, depth + 1)];
  if (schema.type === "object") {
    const required = schema.required ?? [];
    return Object.fromEntries(required.map((name) => [name, example(schema.properties[name], document_, depth + 1)]));
  }
  if (schema.type === "integer" || schema.type === "number") return Math.max(schema.minimum ?? 1, 1);
  return schema.type === "boolean" ? true : "Hello";
}

function curl(verb, path, schema, document_) {
  const url = new URL("..", import.meta.url).href.replace(/\/$/, "") + path;
  if (!schema) return `curl ${verb === "get" ? "" : `-X ${verb.toUpperCase()} `}${url}`;
  const body = JSON.stringify(example(schema, document_)).replaceAll("'", "'\\''");
  return `curl ${url} -H 'content-type: application/json' -d '${body}'`;
}

function operationPanel(verb, path, operation, document_) {
  const reference = operation.requestBody?.content["application/json"].schema;
  const schema = reference && resolved(reference, document_);
  const summary = element(
    "summary", "", element("span", "verb", verb.toUpperCase()), element("span", "path", path),
    element("span", "hint", operation.summary.split("\n")[0]),
  );
  const inside = element("div", "inside");
  if (schema?.description) inside.append(element("p", "", schema.description));
  if (schema) inside.append(fieldTable(schema, document_));
  inside.append(element("pre", "", curl(verb, path, schema, document_)));
  const panel = element("details", "operation", summary, inside);
  panel.dataset.words = [path, ...Object.keys(schema?.properties ?? {})].join(" ").toLowerCase();
  return panel;
}

function show(document_) {
  $("version").textContent = `${document_.info.title} ${document_.info.version}`;
  const panels = Object.entries(document_.paths).flatMap(([path, verbs]) =>
    Object.entries(verbs).map(([verb, operation]) => operationPanel(verb, path, operation, document_)),
  );
  $("operations").replaceChildren(...panels);
  filter();
}

function filter() {
  const wanted = $("find").value.trim().toLowerCase();
  for (const panel of $("operations").children) panel.hidden = !panel.dataset.words.includes(wanted);
}

async function load() {
  $("notice").hidden = true;
  try {
    show(await getJson("/openapi.json"));
    $("key-form").hidden = true;
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    $("notice").textContent = error.message;
    $("notice").hidden = false;
  }
}

$("find").addEventListener("input", filter);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  load();
});
load();
