// The messages of a conversation as DOM nodes, including the answer that is being generated.

import { MarkdownStream } from "./markdown.js";
import { siblings } from "./store.js";

const MAX_RENDER_SHARE = 8; // after drawing for t ms, wait 8 t before drawing again
const TOKEN_BATCH = 500;

export function element(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function button(label, title, action) {
  return element("button", { type: "button", title, "aria-label": title, "data-do": action }, label);
}

// A user's message.
export function userMessage(chat, node) {
  const body = element("div", { className: "body plain" }, node.content);
  const actions = element("div", { className: "actions" }, ...branches(chat, node), button("Edit", "Edit this message", "edit"), button("Copy", "Copy this message", "copy"));
  return element("article", { className: "message user", "data-node": node.id, "aria-label": "You" }, body, actions);
}

function branches(chat, node) {
  const all = siblings(chat, node);
  if (all.length < 2) return [];
  const place = all.indexOf(node.id);
  const before = button("‹", "Previous version", "previous");
  const after = button("›", "Next version", "next");
  before.disabled = place === 0;
  after.disabled = place === all.length - 1;
  return [element("span", { className: "branches" }, before, element("span", { "aria-label": `version ${place + 1} of ${all.length}` }, `${place + 1}/${all.length}`), after)];
}

// An answer. `extra` holds facts about it that are not saved: its tokens with their probabilities,
// and its timings.
export class Answer {
  constructor(chat, node, extra, onDraw) {
    this.node = node;
    this.extra = extra;
    this.onDraw = onDraw;
    this.pending = { content: "", reasoning: "" };
    this.timer = 0;
    this.reasoningText = element("div", { className: "markdown" });
    this.reasoningTitle = element("summary", {}, "Reasoning");
    this.reasoning = element("details", { className: "reasoning", hidden: true }, this.reasoningTitle, this.reasoningText);
    this.body = element("div", { className: "body markdown" });
    this.tokens = element("div", { className: "tokens mono", tabIndex: 0, hidden: true, role: "group", "aria-label": "Tokens with their probabilities; the arrow keys move between them" });
    this.numTokens = 0;
    this.note = element("p", { className: "note", hidden: true });
    this.meta = element("span", { className: "meta" });
    this.toggle = button("Tokens", "Show the tokens and their probabilities", "tokens");
    this.toggle.setAttribute("aria-pressed", "false");
    const actions = element("div", { className: "actions" }, ...branches(chat, node), button("Retry", "Generate another answer", "retry"), button("Copy", "Copy this answer", "copy"), this.toggle, this.meta);
    this.root = element("article", { className: "message assistant", "data-node": node.id, "aria-label": "Answer" }, this.reasoning, this.body, this.tokens, this.note, actions);
    this.streams = { content: new MarkdownStream(this.body), reasoning: new MarkdownStream(this.reasoningText) };
    this.add(node.content, node.reasoning);
    this.draw();
    this.update();
  }

  // More text has arrived. It is drawn with the next frame, or later if drawing is slow.
  add(content, reasoning) {
    this.pending.content += content;
    this.pending.reasoning += reasoning;
    if (!this.timer) this.timer = requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.timer);
    clearTimeout(this.timer);
    const started = performance.now();
    const { pending } = this;
    this.pending = { content: "", reasoning: "" };
    for (const name of ["reasoning", "content"]) if (pending[name]) this.streams[name].append(pending[name]);
    if (pending.reasoning) this.reasoning.hidden = false;
    if (!this.tokens.hidden) this.drawTokens();
    this.onDraw();
    const pause = (performance.now() - started) * MAX_RENDER_SHARE;
    const again = () => {
      this.timer = 0;
      if (this.pending.content || this.pending.reasoning) this.add("", "");
    };
    this.timer = pause > 16 ? setTimeout(again, pause) : requestAnimationFrame(again);
  }

  // The text is complete, or was stopped.
  end() {
    this.draw();
    for (const stream of Object.values(this.streams)) stream.end();
    this.update();
    this.onDraw();
  }

  update() {
    const { node, extra } = this;
    const isThinking = extra.isRunning && node.reasoning && !node.content;
    this.root.classList.toggle("running", Boolean(extra.isRunning));
    this.reasoningTitle.textContent = isThinking ? "Reasoning …" : "Reasoning";
    this.note.hidden = !node.note;
    this.note.textContent = node.note;
    this.toggle.hidden = !extra.tokens.length;
    this.meta.textContent = extra.meta;
  }

  showTokens(isShown) {
    this.toggle.setAttribute("aria-pressed", String(isShown));
    this.tokens.hidden = !isShown;
    this.body.hidden = isShown;
    if (isShown) this.drawTokens();
  }

  drawTokens() {
    const { tokens } = this.extra;
    const end = Math.min(tokens.length, this.numTokens + TOKEN_BATCH);
    const made = document.createDocumentFragment();
    for (; this.numTokens < end; this.numTokens++) {
      const one = tokens[this.numTokens];
      const span = element("span", { className: "token", "data-at": String(this.numTokens) }, one.token);
      span.style.setProperty("--sure", Math.exp(one.logprob).toFixed(3));
      made.append(span);
    }
    this.tokens.append(made);
    if (end < tokens.length) requestAnimationFrame(() => this.drawTokens());
  }
}

// The tooltip of a token: the alternatives, likeliest first.
export function tokenTip(one) {
  const rows = [one, ...one.top_logprobs.filter((other) => other.token !== one.token)].sort((a, b) => b.logprob - a.logprob);
  const table = element("table");
  for (const entry of rows) {
    const chance = Math.exp(entry.logprob ?? -Infinity);
    const bar = element("i");
    bar.style.width = `${Math.round(chance * 60)}px`;
    const line = element("tr", { className: entry === one ? "drawn" : "" }, element("td", { className: "mono" }, JSON.stringify(entry.token)), element("td", {}, `${(chance * 100).toFixed(chance < 0.1 ? 2 : 1)} %`), element("td", {}, bar));
    table.append(line);
  }
  return table;
}
