// Conversations in this browser's localStorage: one entry each, bounded, the oldest deleted first.
//
// A conversation is a tree of messages. Editing or retrying adds a branch next to the old one.
// `selected` of each message is the child that is shown.

const PREFIX = "llmc.chat.";
const SETTINGS = "llmc.settings";
const THEME = "llmc.theme";
const MAX_CHATS = 200;
const MAX_BYTES = 4_000_000; // of all conversations; browsers give 5 MB
const MAX_TEXT = 1_000_000; // characters of one message
const MAX_NODES = 5_000;
const ROLES = ["user", "assistant"];

export function newId() {
  return crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("-");
}

export function newChat(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, root: { children: [], selected: null }, nodes: {} };
}

export function addNode(chat, parentId, role, content) {
  const node = { id: newId(), parent: parentId, role, content, reasoning: "", note: "", children: [], selected: null };
  chat.nodes[node.id] = node;
  const parent = parentId ? chat.nodes[parentId] : chat.root;
  parent.children.push(node.id);
  parent.selected = node.id;
  return node;
}

// The shown messages, from the first to the last.
export function path(chat) {
  const shown = [];
  for (let id = chat.root.selected; id; id = chat.nodes[id].selected) shown.push(chat.nodes[id]);
  return shown;
}

export function siblings(chat, node) {
  return (node.parent ? chat.nodes[node.parent] : chat.root).children;
}

export function select(chat, node) {
  (node.parent ? chat.nodes[node.parent] : chat.root).selected = node.id;
}

function keys() {
  return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
}

function read(text) {
  try {
    return checked(JSON.parse(text));
  } catch {
    return null;
  }
}

export function loadChat(id) {
  return read(localStorage.getItem(PREFIX + id) ?? "null");
}

// Newest first, as {id, title, updated}.
export function listChats() {
  const found = [];
  for (const key of keys()) {
    const chat = read(localStorage.getItem(key));
    if (chat) found.push({ id: chat.id, title: chat.title, updated: chat.updated });
  }
  return found.sort((a, b) => b.updated - a.updated);
}

// Returns how many old conversations were deleted to make room, or -1 if this one does not fit.
export function saveChat(chat) {
  const text = JSON.stringify(chat);
  if (text.length > MAX_BYTES) return -1;
  const others = listChats().filter((one) => one.id !== chat.id);
  let size = others.reduce((sum, one) => sum + localStorage.getItem(PREFIX + one.id).length, text.length);
  let dropped = 0;
  const dropOldest = () => {
    const { id } = others.pop();
    size -= localStorage.getItem(PREFIX + id).length;
    localStorage.removeItem(PREFIX + id);
    dropped += 1;
  };
  while (others.length && (size > MAX_BYTES || others.length >= MAX_CHATS)) dropOldest();
  for (;;) {
    try {
      localStorage.setItem(PREFIX + chat.id, text);
      return dropped;
    } catch {
      if (!others.length) return -1; // the browser gives less than we thought
      dropOldest();
    }
  }
}

export function deleteChat(id) {
  localStorage.removeItem(PREFIX + id);
}

export function exportChats() {
  const chats = listChats().map(({ id }) => loadChat(id));
  return JSON.stringify({ format: "llmc conversations", version: 1, chats }, null, 1);
}

// Returns how many were added. Throws if the file has other contents.
export function importChats(text) {
  const data = JSON.parse(text);
  if (data?.format !== "llmc conversations" || !Array.isArray(data.chats)) throw new Error("it contains no llmc conversations.");
  const chats = data.chats.slice(0, MAX_CHATS).map(checked);
  if (chats.includes(null)) throw new Error("it contains an incomplete conversation.");
  for (const chat of chats) if (saveChat(chat) < 0) throw new Error("it does not fit into this browser's storage.");
  return chats.length;
}

// A conversation with exactly the known fields, or null: files and storage may contain anything.
function checked(data) {
  const isId = (value) => typeof value === "string" && /^[\w-]{1,80}$/.test(value);
  const text = (value) => (typeof value === "string" ? value.slice(0, MAX_TEXT) : "");
  if (!data || !isId(data.id) || typeof data.nodes !== "object" || !data.nodes) return null;
  const given = Object.entries(data.nodes);
  if (given.length > MAX_NODES) return null;
  const nodes = {};
  for (const [id, node] of given) {
    if (!isId(id) || id === "__proto__" || !node || !ROLES.includes(node.role)) return null;
    nodes[id] = { id, parent: null, role: node.role, content: text(node.content), reasoning: text(node.reasoning), note: text(node.note), children: [], selected: null };
  }
  const linked = new Set(); // each message has one parent: no cycles
  const link = (to, from, parent) => {
    for (const id of Array.isArray(from?.children) ? from.children : []) {
      if (!Object.hasOwn(nodes, id) || linked.has(id)) return false;
      linked.add(id);
      nodes[id].parent = parent;
      to.children.push(id);
    }
    to.selected = to.children.includes(from?.selected) ? from.selected : (to.children.at(-1) ?? null);
    return true;
  };
  const root = { children: [], selected: null };
  if (!link(root, data.root, null)) return null;
  for (const [id, node] of given) if (!link(nodes[id], node, id)) return null;
  const settings = {};
  for (const [name, value] of Object.entries(data.settings ?? {})) {
    if (SETTING_NAMES.includes(name) && typeof value === "string") settings[name] = value.slice(0, MAX_TEXT);
  }
  const time = (value) => (Number.isFinite(value) ? value : Date.now());
  return { id: data.id, title: text(data.title).slice(0, 200), created: time(data.created), updated: time(data.updated), settings, root, nodes };
}

export const SETTING_NAMES = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed", "n", "schema", "logprobs"];

export function lastSettings() {
  try {
    const kept = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    return Object.fromEntries(SETTING_NAMES.filter((name) => typeof kept[name] === "string").map((name) => [name, kept[name]]));
  } catch {
    return {};
  }
}

export function keepSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // full: the settings last until the page is closed
  }
}

export function theme() {
  return localStorage.getItem(THEME) ?? "auto";
}

export function keepTheme(value) {
  localStorage.setItem(THEME, value);
}
