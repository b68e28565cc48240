// The page: conversations on the left, the chat in the middle, engine and settings on the right.

import { events, getJson, hasKey, setKey } from "./api.js";
import { EnginePanel } from "./engine.js";
import { Answer, element, tokenTip, userMessage } from "./messages.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "n"];
const SAVE_MS = 3000; // between two saves of an answer that is being generated
const NEAR_END = 80; // pixels from the end of the log within which it follows the answer
const TOP_LOGPROBS = 5;

let chat = store.newChat(store.lastSettings());
let answers = new Map(); // the Answer of each shown message, by id
const extras = new Map(); // facts about answers, by id; not saved
const running = new Map(); // by conversation: {chat, abort}
let isFollowing = true;

// ---- the log ----

function extraOf(node) {
  if (!extras.has(node.id)) extras.set(node.id, { tokens: [], meta: "", isRunning: false });
  return extras.get(node.id);
}

function render() {
  answers = new Map();
  const shown = store.path(chat).map((node) => {
    if (node.role === "user") return userMessage(chat, node);
    const answer = new Answer(chat, node, extraOf(node), follow);
    if (!extraOf(node).isRunning) answer.end();
    answers.set(node.id, answer);
    return answer.root;
  });
  if (!shown.length) shown.push(element("p", { className: "empty" }, "Ask the model something. The engine panel (⚙) shows how the answer is computed."));
  $("log").replaceChildren(...shown);
  isFollowing = true;
  follow();
  showRunning();
  for (const name of store.SETTING_NAMES) {
    const input = $(`set-${name}`);
    if (input.type === "checkbox") input.checked = chat.settings[name] === "yes";
    else input.value = chat.settings[name] ?? "";
  }
  checkSchema();
}

function follow() {
  const box = $("scroll");
  if (isFollowing) box.scrollTop = box.scrollHeight;
  $("to-end").hidden = isFollowing;
}

$("scroll").addEventListener("scroll", () => {
  const box = $("scroll");
  isFollowing = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  $("to-end").hidden = isFollowing;
});
$("to-end").addEventListener("click", () => {
  isFollowing = true;
  follow();
  $("prompt").focus();
});

function showRunning() {
  const isRunning = running.has(chat.id);
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// ---- conversations ----

function listChats() {
  const items = store.listChats().map((one) => {
    const open = element("button", { type: "button", className: "open", "data-chat": one.id }, one.title || "Untitled");
    if (one.id === chat.id) open.setAttribute("aria-current", "true");
    const drop = element("button", { type: "button", className: "icon", title: "Delete", "aria-label": `Delete ${one.title}`, "data-drop": one.id }, "×");
    return element("li", {}, open, drop);
  });
  $("chat-list").replaceChildren(...items);
}

function save(one) {
  one.updated = Date.now();
  const dropped = store.saveChat(one);
  if (dropped < 0) notice("This conversation is too large for the browser's storage; export it to keep it.");
  else if (dropped) notice(`The browser's storage is full: ${dropped} of the oldest conversations were deleted.`);
}

function openChat(one) {
  chat = one;
  notice("");
  render();
  listChats();
  closePanels();
  $("prompt").focus();
}

$("new-chat").addEventListener("click", () => openChat(store.newChat(store.lastSettings())));
$("chat-list").addEventListener("click", (event) => {
  const { chat: id, drop } = event.target.dataset;
  const live = running.get(id ?? drop);
  if (id) {
    const one = live?.chat ?? store.loadChat(id);
    if (one) openChat(one);
  } else if (drop && confirm("Delete this conversation?")) {
    live?.abort.abort();
    store.deleteChat(drop);
    if (drop === chat.id) openChat(store.newChat(store.lastSettings()));
    else listChats();
  }
});
$("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations in this browser?")) return;
  for (const { abort } of running.values()) abort.abort();
  for (const { id } of store.listChats()) store.deleteChat(id);
  openChat(store.newChat(store.lastSettings()));
});
$("export").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([store.exportChats()], { type: "application/json" }));
  element("a", { href: url, download: "llmc-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
});
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (!file) return;
  try {
    const count = store.importChats(await file.text());
    notice(`${count} conversations were added.`);
  } catch (error) {
    notice(`The file can't be imported: ${error.message}`);
  }
  listChats();
});
addEventListener("storage", listChats); // another tab

// ---- ask ----

function sampling(settings) {
  const body = {};
  for (const name of NUMBERS) {
    const input = $(`set-${name}`);
    if (settings[name] === undefined || settings[name] === "") continue;
    const number = Number(settings[name]);
    if (!Number.isFinite(number) || (input.value === settings[name] && !input.validity.valid)) {
      throw new Error(`${name}: ${input.validationMessage || "this is not a number."}`);
    }
    body[name] = number;
  }
  if (settings.schema?.trim()) {
    let schema;
    try {
      schema = JSON.parse(settings.schema);
    } catch (error) {
      throw new Error(`The schema is not JSON: ${error.message}`);
    }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.logprobs === "yes") Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return body;
}

// The messages from the first to this one.
function history(one, node) {
  const messages = [];
  for (let at = node; at; at = one.nodes[at.parent]) messages.unshift({ role: at.role, content: at.content });
  if (one.settings.system?.trim()) messages.unshift({ role: "system", content: one.settings.system });
  return messages;
}

// The fields that the settings ask for; null, and what is wrong is told, where one can't be sent.
function checkedSampling(settings) {
  try {
    return sampling(settings);
  } catch (error) {
    openPanel("side", "settings");
    notice(error.message);
    return null;
  }
}

async function ask(question) {
  const one = chat;
  const fields = checkedSampling(one.settings);
  if (running.has(one.id) || !fields) return;
  const body = { ...(served && { model: served }), ...fields, messages: history(one, question), stream: true, stream_options: { include_usage: true } };
  notice("");
  const nodes = Array.from({ length: body.n ?? 1 }, () => store.addNode(one, question.id, "assistant", ""));
  store.select(one, nodes[0]);
  const abort = new AbortController();
  running.set(one.id, { chat: one, abort });
  for (const node of nodes) Object.assign(extraOf(node), { isRunning: true, started: performance.now(), first: 0, count: 0 });
  if (one === chat) render();
  save(one);
  listChats();
  $("announce").textContent = "Generating the answer.";
  let saved = Date.now();
  try {
    for await (const event of events("/v1/chat/completions", { body, signal: abort.signal })) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) take(nodes[choice.index], choice);
      if (event.usage && nodes.length === 1) extraOf(nodes[0]).count = event.usage.completion_tokens;
      if (Date.now() - saved > SAVE_MS) {
        save(one);
        saved = Date.now();
      }
    }
    for (const node of nodes) if (!extraOf(node).finish) node.note = "The server closed the connection before the end.";
  } catch (error) {
    const text = abort.signal.aborted ? "Stopped." : error instanceof TypeError ? "The connection to the server was lost." : error.message;
    for (const node of nodes) if (!extraOf(node).finish) node.note = text;
    if (error.status === 401) askForKey(hasKey());
    if (error instanceof TypeError && !abort.signal.aborted) connect();
  }
  running.delete(one.id);
  for (const node of nodes) {
    const extra = extraOf(node);
    extra.isRunning = false;
    extra.meta = times(extra);
    if (extra.finish === "length") node.note = "Cut off: max_tokens was reached or the context is full.";
    answers.get(node.id)?.end();
  }
  if (store.loadChat(one.id)) save(one); // it may have been deleted meanwhile
  listChats();
  if (one === chat) {
    showRunning();
    const said = nodes[0].content || nodes[0].note;
    $("announce").textContent = `Answer: ${said.slice(0, 3000)}`;
  }
}

function take(node, choice) {
  const extra = extraOf(node);
  const { content = "", reasoning_content: reasoning = "" } = choice.delta;
  if (content || reasoning) {
    extra.first ||= performance.now();
    extra.last = performance.now();
    extra.count += 1;
  }
  node.content += content;
  node.reasoning += reasoning;
  if (choice.logprobs) extra.tokens.push(...choice.logprobs.content);
  if (choice.finish_reason) extra.finish = choice.finish_reason;
  const answer = answers.get(node.id);
  if (!answer) return;
  answer.add(content, reasoning);
  if (choice.logprobs && extra.tokens.length === choice.logprobs.content.length) answer.showTokens(true);
  if (extra.count <= 2 || choice.finish_reason) answer.update();
}

function times(extra) {
  if (!extra.first) return "";
  const seconds = (extra.last - extra.first) / 1000;
  const rate = seconds > 0 && extra.count > 1 ? ` · ${((extra.count - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${extra.count} tokens · first after ${((extra.first - extra.started) / 1000).toFixed(2)} s${rate}`;
}

function send(text) {
  const last = store.path(chat).at(-1);
  const question = store.addNode(chat, last?.id ?? null, "user", text);
  chat.title ||= text.trim().split("\n")[0].slice(0, 80);
  ask(question);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (!text.trim() || running.has(chat.id) || !checkedSampling(chat.settings)) return;
  $("prompt").value = "";
  grow($("prompt"));
  send(text);
});
$("stop").addEventListener("click", stop);

function stop() {
  running.get(chat.id)?.abort.abort();
  $("prompt").focus();
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.4)}px`;
}

$("prompt").addEventListener("input", () => grow($("prompt")));
$("prompt").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("prompt").value) {
    const last = store.path(chat).findLast((node) => node.role === "user");
    if (last && !running.has(chat.id)) {
      event.preventDefault();
      edit(last);
    }
  }
});

// ---- actions on messages ----

$("log").addEventListener("click", (event) => {
  const pressed = event.target.closest("button");
  if (!pressed) return;
  if (pressed.className === "copy") return copy(pressed, pressed.closest(".code").querySelector("code").textContent);
  const node = chat.nodes[pressed.closest("[data-node]")?.dataset.node];
  if (!node) return;
  const isBusy = running.has(chat.id);
  switch (pressed.dataset.do) {
    case "copy":
      return copy(pressed, node.content);
    case "edit":
      if (!isBusy) edit(node);
      break;
    case "retry":
      if (!isBusy) ask(chat.nodes[node.parent]);
      break;
    case "tokens":
      answers.get(node.id).showTokens(pressed.getAttribute("aria-pressed") !== "true");
      break;
    case "previous":
    case "next": {
      const all = store.siblings(chat, node);
      const other = chat.nodes[all[all.indexOf(node.id) + (pressed.dataset.do === "next" ? 1 : -1)]];
      store.select(chat, other);
      if (!isBusy) save(chat);
      const { scrollTop } = $("scroll");
      render();
      isFollowing = false;
      $("scroll").scrollTop = scrollTop;
      document.querySelector(`[data-node="${other.id}"] [data-do="${pressed.dataset.do}"]`)?.focus();
    }
  }
});

async function copy(pressed, text) {
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Not allowed"; // the page was loaded from another machine over plain HTTP
  }
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

function edit(node) {
  const message = document.querySelector(`[data-node="${node.id}"]`);
  const area = element("textarea", { value: node.content, "aria-label": "Edit the message" });
  const box = element("form", { className: "edit" }, area, element("button", { type: "submit", className: "primary" }, "Send"), element("button", { type: "button" }, "Cancel"));
  const close = () => {
    render();
    document.querySelector(`[data-node="${node.id}"] [data-do="edit"]`)?.focus();
  };
  const submit = () => {
    if (!area.value.trim() || !checkedSampling(chat.settings)) return;
    const question = store.addNode(chat, node.parent, "user", area.value);
    ask(question);
    $("prompt").focus();
  };
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  box.lastChild.addEventListener("click", close);
  area.addEventListener("input", () => grow(area));
  area.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
  });
  message.replaceChildren(box);
  grow(area);
  area.focus();
}

// ---- probabilities of tokens ----

function showTip(span) {
  const one = extras.get(span.closest("[data-node]").dataset.node)?.tokens[Number(span.dataset.at)];
  if (!one) return;
  const tip = $("tip");
  tip.replaceChildren(tokenTip(one));
  tip.hidden = false;
  const place = span.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - size.width - 8))}px`;
  const above = place.top - size.height - 6;
  tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
  for (const other of document.querySelectorAll(".token.at")) other.classList.remove("at");
  span.classList.add("at");
}

function hideTip() {
  $("tip").hidden = true;
}

$("log").addEventListener("mouseover", (event) => (event.target.className.startsWith?.("token") && event.target.dataset.at ? showTip(event.target) : hideTip()));
$("log").addEventListener("mouseleave", hideTip);
$("log").addEventListener("focusout", hideTip);
$("log").addEventListener("keydown", (event) => {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  if (!step || !event.target.classList.contains("tokens")) return;
  event.preventDefault();
  const at = event.target.querySelector(".token.at");
  const to = at ? at[step] : event.target.firstElementChild;
  if (!to) return;
  to.scrollIntoView({ block: "nearest" });
  showTip(to);
  $("announce").textContent = [...$("tip").querySelectorAll("tr")].map((line) => line.textContent).join(", ");
});

// ---- settings ----

function checkSchema() {
  let why = "";
  const text = $("set-schema").value.trim();
  try {
    if (text) JSON.parse(text);
  } catch (error) {
    why = error.message;
  }
  $("schema-error").textContent = why;
  $("schema-error").hidden = !why;
}

$("settings").addEventListener("input", (event) => {
  const { id, type, checked, value } = event.target;
  chat.settings[id.slice(4)] = type === "checkbox" ? (checked ? "yes" : "") : value;
  if (id === "set-schema") checkSchema();
  store.keepSettings(chat.settings);
  if (chat.title && !running.has(chat.id)) save(chat);
});

// ---- panels, tabs, colors ----

const isNarrow = matchMedia("(max-width: 1000px)");
const panels = { chats: $("show-chats"), side: $("show-side") };

function showPanel(id, isOpen) {
  $(id).classList.toggle("open", isOpen);
  panels[id].setAttribute("aria-expanded", String(isOpen));
  watchEngine();
}

function openPanel(id, tab) {
  if (tab) selectTab(tab);
  showPanel(id, true);
}

function closePanels() {
  if (isNarrow.matches) for (const id of Object.keys(panels)) showPanel(id, false);
}

for (const [id, opener] of Object.entries(panels)) {
  opener.addEventListener("click", () => {
    const isOpen = !$(id).classList.contains("open");
    if (isOpen) closePanels();
    showPanel(id, isOpen);
  });
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function selectTab(name) {
  for (const tab of tabs) {
    const isSelected = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(isSelected));
    tab.tabIndex = isSelected ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !isSelected;
  }
  watchEngine();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => selectTab(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const other = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    selectTab(other.getAttribute("aria-controls"));
    other.focus();
  });
}

addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || $("key-dialog").open) return;
  const isOpen = isNarrow.matches && Object.keys(panels).find((id) => $(id).classList.contains("open"));
  if (isOpen) {
    showPanel(isOpen, false);
    panels[isOpen].focus();
  } else if (!$("tip").hidden) hideTip();
  else stop();
});

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const label = `Colors: ${name === "auto" ? "system default" : name}`;
  Object.assign($("theme"), { textContent: THEMES[name], title: label });
  $("theme").setAttribute("aria-label", label);
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  store.keepTheme(name);
  setTheme(name);
});

// ---- the server: key, model, engine ----

let asking = null; // the promise of a key while its dialog is open

function askForKey(isWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-wrong").hidden = !isWrong;
    $("key").value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      if ($("key").value) setKey($("key").value);
      resolve();
      connect();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

$("forget-key").addEventListener("click", () => {
  setKey(null);
  location.reload();
});

function connection(state, text) {
  const shown = $("connection");
  if (shown.textContent === text) return;
  Object.assign(shown, { textContent: text });
  shown.dataset.state = state;
}

let retry = 0;
let served = ""; // the selected model, if there are several

// Fetches the model's facts; retries until the server responds.
async function connect() {
  clearTimeout(retry);
  try {
    const [models, version] = await Promise.all([getJson("/v1/models"), getJson("/version")]);
    connection("up", "connected");
    showModel(models.data, version.version);
    watchEngine();
  } catch (error) {
    if (error.status === 401) return askForKey(hasKey());
    connection("down", "no connection");
    retry = setTimeout(connect, 2000);
  }
}

async function showModel(models, version) {
  const model = models.find((one) => one.id === served) ?? models[0];
  $("model-name").replaceChildren(models.length > 1 ? modelMenu(models, model, version) : model.id);
  document.title = `${model.id} · llmc`;
  const facts = [
    ["Model", models.map((one) => one.id).join(", ")],
    ["State", model.error ?? model.state],
    ["Context", model.max_model_len && `${model.max_model_len.toLocaleString()} tokens`],
    ["llmc", version],
  ];
  try {
    if (model.state !== "loaded") throw null; // the request would load it
    const info = await getJson(`/tokenizer_info?model=${encodeURIComponent(model.id)}`);
    facts.push(["Tokenizer", info.tokenizer_class], ["Vocabulary", info.vocab_size?.toLocaleString()]);
    $("template-box").hidden = !info.chat_template;
    $("template").textContent = info.chat_template ?? "";
  } catch {
    // a model without a tokenizer, or one that is not loaded
  }
  $("facts").replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]));
  $("forget-key").hidden = !hasKey();
}

function modelMenu(models, model, version) {
  const menu = element("select", { ariaLabel: "Model" }, ...models.map(({ id }) => element("option", { value: id, selected: id === model.id }, id)));
  served = model.id;
  engine.model = served;
  menu.addEventListener("change", () => {
    served = menu.value;
    engine.watch(false);
    showModel(models, version);
    watchEngine();
  });
  return menu;
}

const engine = new EnginePanel({
  onUp: () => connection("up", "connected"),
  onDown: (text) => {
    connection("down", text);
    connect();
  },
  onKey: () => askForKey(hasKey()),
});

// Listens only while the panel is visible.
function watchEngine() {
  engine.watch($("side").classList.contains("open") && !$("engine").hidden && !document.hidden);
}

document.addEventListener("visibilitychange", watchEngine);

setTheme(store.theme());
for (const id of Object.keys(panels)) showPanel(id, !isNarrow.matches);
render();
listChats();
connect();
$("prompt").focus();
