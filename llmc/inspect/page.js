"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function size(bytes) {
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]])
    if (bytes >= factor) return (bytes / factor).toFixed(bytes < 10 * factor ? 1 : 0) + " " + unit;
  return bytes + " B";
}

const plural = (n, word) => n + " " + word + (n === 1 ? "" : "s");
const color = (group) => "background:var(--" + group + ")";
const ops = (stage) => stage.ops.map((number) => data.ops[number]);

// The ops of a stage by part: -1 before the layers, then the layers, then those after the layers.
function parts(stage) {
  const found = new Map();
  for (const op of ops(stage)) {
    if (!found.has(op.layer)) found.set(op.layer, []);
    found.get(op.layer).push(op);
  }
  return found;
}

function partName(layer) {
  if (layer < 0) return "Before the layers";
  return layer >= data.layers ? "After the layers" : "Layer " + layer;
}

function count(list) {
  const found = new Map();
  for (const op of list) found.set(op.of, (found.get(op.of) || 0) + 1);
  return found;
}

// How often each op was removed and added between two lists.
function difference(before, after) {
  const old = count(before), now = count(after), gone = [], came = [];
  for (const name of new Set([...old.keys(), ...now.keys()])) {
    const change = (now.get(name) || 0) - (old.get(name) || 0);
    if (change < 0) gone.push([name, -change]);
    if (change > 0) came.push([name, change]);
  }
  return { gone: gone.sort((a, b) => b[1] - a[1]), came: came.sort((a, b) => b[1] - a[1]) };
}

const state = { stage: 0, open: new Set(), closed: new Set(), all: null, only: false, find: "" };

function drawStages() {
  const most = Math.max(...data.stages.map((s) => s.ops.length));
  $("stages").replaceChildren(...data.stages.map((stage, i) => {
    const before = i ? data.stages[i - 1].ops.length : 0;
    const change = stage.ops.length - before;
    const idle = i > 0 && sameOps(data.stages[i - 1], stage);
    const said = i === 0 ? plural(stage.ops.length, "op")
      : stage.enabled === false ? "off" : idle ? "no match"
      : stage.ops.length + " (" + (change > 0 ? "+" : "") + change + ")";
    return make("li", { class: idle ? "idle" : "" },
      make("button", { type: "button", "aria-current": String(i === state.stage), "data-stage": stage.name,
        onclick: () => { location.hash = "pass=" + stage.name; } },
      make("div", { class: "row" }, make("span", { class: "what" }, stage.name),
        make("span", { class: "count" }, said)),
      make("div", { class: "bar" }, make("i", { style: "width:" + 100 * stage.ops.length / most + "%" }))));
  }));
}

function sameOps(a, b) {
  return a.ops.length === b.ops.length && a.ops.every((number, i) => number === b.ops[i]);
}

function drawAbout() {
  const stage = data.stages[state.stage], before = data.stages[state.stage - 1];
  const children = [make("h2", {}, stage.name), make("p", {}, stage.title)];
  if (!before) children.push($("reading").content.cloneNode(true));
  if (stage.before) children.push(make("div", { class: "pictures" },
    make("div", {}, make("h3", {}, "BEFORE, IN SHORT"), make("pre", {}, stage.before)),
    make("div", {}, make("h3", {}, "AFTER"), make("pre", {}, stage.after))));
  if (before) {
    const { gone, came } = difference(ops(before), ops(stage));
    const chips = [...gone.map(([n, k]) => make("span", { class: "chip gone" }, "\u2212" + k + " " + n)),
      ...came.map(([n, k]) => make("span", { class: "chip came" }, "+" + k + " " + n))];
    const nothing = stage.enabled === false ? "switched off" : "nothing to change in this model";
    if (!chips.length && sameOps(before, stage)) chips.push(make("span", { class: "chip same" }, nothing));
    children.push(make("div", { class: "effect" }, ...chips));
  }
  if (stage.notes && stage.notes.length) children.push(make("ul", { class: "notes" },
    ...stage.notes.map((note) => make("li", {}, note))));
  $("about").replaceChildren(...children);
}

const matches = (op) => !state.find ||
  [op.of, op.says, op.shape, ...op.args].join(" ").toLowerCase().includes(state.find);

function opRow(op, mark) {
  return make("div", { class: "op " + mark, "data-id": op.id,
    onmouseenter: (event) => enter(op, event), onmousemove: place, onmouseleave: leave },
  make("span", { class: "dot", style: color(op.group) }), make("code", {}, op.op),
  make("span", { class: "says" }, op.says),
  make("span", { class: "weights" }, op.bytes ? size(op.bytes) : ""),
  make("span", { class: "out" }, op.shape));
}

// The rows of one side: changed ops, and runs of unchanged ops collapsed into one line.
function rows(list, marks, whole) {
  const made = [];
  let quiet = [];
  const flush = () => {
    const hidden = quiet;
    quiet = [];
    if (!hidden.length) return;
    if (hidden.length < 4 && !state.only) made.push(...hidden.map((op) => opRow(op, "")));
    else if (!state.only || whole) {
      const line = make("button", { type: "button", class: "skip",
        onclick: () => line.replaceWith(...hidden.map((op) => opRow(op, ""))) },
      "\u22EE " + plural(hidden.length, "op") + " unchanged");
      made.push(line);
    }
  };
  for (const op of list) {
    if (state.find && !matches(op)) continue;
    const mark = marks.get(op) || "";
    if (mark || whole || state.find) { flush(); made.push(opRow(op, mark)); } else quiet.push(op);
  }
  flush();
  return made.length ? made : [make("div", { class: "none" }, state.find ? "nothing found" : "no ops")];
}

// gone and came: removed and added ops; moved: the same op with other inputs.
function markChanges(before, after) {
  const key = (op) => op.id + " " + op.of;
  const old = new Map(before.map((op) => [key(op), op])), now = new Map(after.map((op) => [key(op), op]));
  const moved = (a, b) => JSON.stringify(a.args) !== JSON.stringify(b.args);
  const marks = new Map();
  for (const op of before) if (!now.has(key(op))) marks.set(op, "gone");
  for (const op of after) {
    if (!old.has(key(op))) marks.set(op, "came");
    else if (moved(old.get(key(op)), op)) marks.set(op, "moved");
  }
  return marks;
}

function mixBar(list) {
  const groups = new Map();
  for (const op of list) groups.set(op.group, (groups.get(op.group) || 0) + 1);
  return make("div", { class: "mix", title: [...groups].map(([g, n]) => n + " " + g).join(", ") },
    ...[...groups].map(([g, n]) => make("i", { style: color(g) + ";width:" + 100 * n / list.length + "%" })));
}

function drawPart(layer, before, after, firstChanged) {
  const marks = before ? markChanges(before, after) : new Map();
  const gone = [...marks.values()].filter((m) => m === "gone").length;
  const came = [...marks.values()].filter((m) => m === "came").length;
  const bytes = after.reduce((sum, op) => sum + op.bytes, 0);
  const wanted = state.all !== null ? state.all
    : state.closed.has(layer) ? false : state.open.has(layer) || layer === firstChanged || !!state.find;
  const summary = make("summary", {}, make("b", {}, partName(layer)),
    make("span", {}, plural(after.length, "op")), bytes ? make("span", {}, size(bytes) + " of weights") : "",
    gone ? make("span", { class: "chip gone" }, "\u2212" + gone) : "",
    came ? make("span", { class: "chip came" }, "+" + came) : "",
    before && !marks.size ? make("span", {}, "unchanged") : "", mixBar(after));
  const body = make("div", { class: before ? "two" : "two one" });
  const part = make("details", { class: "part", "data-layer": layer, open: wanted && "" }, summary, body);
  const fill = () => {
    if (body.childElementCount) return;
    if (before) body.append(
      make("div", { class: "side" }, make("h4", {}, "BEFORE"), ...rows(before, marks, false)),
      make("div", { class: "side" }, make("h4", {}, "AFTER"), ...rows(after, marks, false)));
    else body.append(make("div", { class: "side" }, ...rows(after, marks, true)));
  };
  if (wanted) fill();
  part.addEventListener("toggle", () => {
    (part.open ? state.open : state.closed).add(layer);
    (part.open ? state.closed : state.open).delete(layer);
    if (part.open) fill();
  });
  return marks.size || !before || !state.only ? part : "";
}

function drawColumns() {
  const stage = data.stages[state.stage], previous = data.stages[state.stage - 1];
  const after = parts(stage), before = previous ? parts(previous) : null;
  const layers = [...new Set([...(before ? before.keys() : []), ...after.keys()])].sort((a, b) => a - b);
  const first = before
    ? layers.find((l) => markChanges(before.get(l) || [], after.get(l) || []).size)
    : layers.find((l) => l >= 0);
  const inside = before ? layers.find((l) => l >= 0 && l < data.layers
    && markChanges(before.get(l) || [], after.get(l) || []).size) : undefined;
  $("columns").replaceChildren(...layers.map((layer) => drawPart(layer,
    before ? before.get(layer) || [] : null, after.get(layer) || [], inside ?? first)));
}

// The tooltip shows an op in full, and highlights its inputs and its users.
function enter(op, event) {
  const tip = $("tip");
  tip.replaceChildren(make("b", {}, op.says), make("code", {}, op.id + " = " + op.of + "(" + op.args.join(", ") + ")"));
  if (op.shape) tip.append(make("div", {}, "returns " + op.shape + (op.shape.includes("T") ? "; T is the number of tokens in a step" : "")));
  if (op.bytes) tip.append(make("div", {}, "reads " + size(op.bytes) + " of weights"));
  tip.hidden = false;
  place(event);
  const side = event.currentTarget.parentElement;
  for (const row of side.querySelectorAll(".op")) {
    if (op.from.includes(row.dataset.id)) row.classList.add("from");
  }
  const readers = new Set(data.ops.filter((o) => o.from.includes(op.id)).map((o) => o.id));
  for (const row of side.querySelectorAll(".op")) if (readers.has(row.dataset.id)) row.classList.add("into");
}

function place(event) {
  const tip = $("tip");
  const x = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 12);
  const below = event.clientY + 18;
  const y = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below;
  tip.style.left = Math.max(8, x) + "px";
  tip.style.top = Math.max(8, y) + "px";
}

function leave() {
  $("tip").hidden = true;
  for (const row of document.querySelectorAll(".from, .into")) row.classList.remove("from", "into");
}

function draw() {
  drawStages();
  drawAbout();
  drawColumns();
  document.body.dataset.stage = data.stages[state.stage].name;
}

function follow() {
  const wanted = decodeURIComponent(location.hash.replace("#pass=", ""));
  const found = data.stages.findIndex((stage) => stage.name === wanted);
  state.stage = Math.max(found, 0);
  state.all = null;
  draw();
}

$("legend").append(...Object.entries(data.groups).map(([group, says]) =>
  make("span", { title: says }, make("span", { class: "dot", style: color(group) }), group)));
$("search").addEventListener("input", (event) => { state.find = event.target.value.toLowerCase().trim(); drawColumns(); });
$("only").addEventListener("change", (event) => { state.only = event.target.checked; drawColumns(); });
$("open").addEventListener("click", () => { state.all = true; drawColumns(); });
$("close").addEventListener("click", () => { state.all = false; drawColumns(); });
addEventListener("hashchange", follow);
follow();
