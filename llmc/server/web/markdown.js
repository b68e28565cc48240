// Markdown -> DOM nodes, line by line as text streams in.
//
// Everything is created with createElement, from the tags below, and with text nodes: text can never
// become markup, and links can only be http, https and mailto. Complete lines are never parsed
// again. The line that is still incomplete is drawn as a preview, which is undone when more of it
// arrives; in a code block its characters are appended as they arrive.

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MARK_ALONE = /^\s*(?:[-*+_#`~>|=]+|\d{1,9}[.)]?)\s*$/;
const MAX_DEPTH = 12; // of nested lists and quotes

function make(tag, className) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  return node;
}

function cut(node, size) {
  while (node.childNodes.length > size) node.lastChild.remove();
}

export class MarkdownStream {
  constructor(root) {
    this.root = root;
    this.partial = ""; // the last line so far, without its line break
    this.state = { stack: [{ kind: "root", node: root }], leaf: null, isAfterBlank: false };
    this.before = null; // the state without the preview
  }

  // Draw more of the text.
  append(text) {
    const lines = (this.partial + text).split("\n");
    if (this.isPlainCode(lines[0])) {
      this.addCode(lines[0]);
      if (lines.length > 1) {
        this.endCodeLine();
        lines.shift();
      }
    } else this.undo();
    this.partial = lines.pop();
    for (const line of lines) this.line(line, false);
    this.preview();
  }

  // The text is complete.
  end() {
    if (this.partial && !this.isPlainCode(this.partial)) {
      this.undo();
      this.line(this.partial, false);
    }
    this.partial = "";
    this.closeLeaf();
  }

  preview() {
    if (!this.partial || MARK_ALONE.test(this.partial)) return; // ambiguous until more of it arrives
    const { stack, leaf, isAfterBlank } = this.state;
    if (leaf && leaf.kind === "code") {
      if (this.isPlainCode(this.partial)) this.addCode(this.partial);
      return;
    }
    this.before = {
      stack: stack.map((one) => ({ ...one, size: one.node.childNodes.length })),
      leaf: leaf && { ...leaf, rows: leaf.body?.childNodes.length },
      isAfterBlank,
    };
    this.line(this.partial, true);
  }

  undo() {
    if (!this.before) return;
    this.state = this.before;
    this.before = null;
    const { stack, leaf } = this.state;
    for (const { node, size } of stack) cut(node, size);
    if (leaf && leaf.kind === "table") cut(leaf.body, leaf.rows);
    if (leaf && leaf.kind === "text") this.drawText(leaf, false);
  }

  // ---- one line ----

  line(line, isPreview) {
    const { state } = this;
    if (state.leaf && state.leaf.kind === "code") return this.codeLine(line);
    let rest = line;
    if (!rest.trim()) {
      this.closeLeaf();
      state.isAfterBlank = true;
      return;
    }
    const isAfterBlank = state.isAfterBlank;
    state.isAfterBlank = false;
    rest = this.enterContainers(rest, isAfterBlank);
    if (!rest.trim()) return;
    const fence = FENCE.exec(rest);
    if (fence) return this.openCode(fence);
    const heading = HEADING.exec(rest);
    if (heading) {
      this.closeLeaf();
      const node = this.add(make(`h${Math.min(heading[1].length + 2, 6)}`));
      node.append(inline(heading[2], isPreview));
      return;
    }
    if (RULE.test(rest)) {
      this.closeLeaf();
      this.add(make("hr"));
      return;
    }
    if (this.table(rest, isPreview)) return;
    if (!state.leaf) {
      state.leaf = { kind: "text", node: this.add(make("p")), source: "" };
    }
    const leaf = state.leaf;
    leaf.source += (leaf.source ? "\n" : "") + rest.replace(/^\s+/, "");
    this.drawText(leaf, isPreview);
  }

  top() {
    return this.state.stack[this.state.stack.length - 1];
  }

  add(node) {
    this.top().node.append(node);
    return node;
  }

  drawText(leaf, isOpen) {
    leaf.node.replaceChildren(inline(leaf.source, isOpen));
  }

  closeLeaf() {
    const { leaf } = this.state;
    if (leaf && leaf.kind === "text") this.drawText(leaf, false);
    this.state.leaf = null;
  }

  pop(size) {
    this.closeLeaf();
    this.state.stack.length = size;
  }

  // Enter, stay in or leave quotes and lists; returns the rest of the line.
  enterContainers(line, isAfterBlank) {
    const { state } = this;
    let rest = line;
    let depth = 1;
    for (; depth < state.stack.length; depth++) {
      const one = state.stack[depth];
      if (one.kind === "quote") {
        const quote = QUOTE.exec(rest);
        if (!quote) break;
        rest = quote[1];
      } else if (one.kind === "item") {
        const indent = /^\s*/.exec(rest)[0].replaceAll("\t", "    ").length;
        if (indent < one.indent) break;
        rest = rest.replaceAll("\t", "    ").slice(one.indent);
      }
    }
    const isNewBlock = isAfterBlank || ITEM.test(rest) || QUOTE.test(rest) || FENCE.test(rest) || HEADING.test(rest) || RULE.test(rest);
    // A line right below a paragraph belongs to it, however it is indented.
    if (depth < state.stack.length && !isNewBlock && state.leaf && state.leaf.kind === "text") return rest;
    if (depth < state.stack.length) {
      const next = state.stack[depth];
      const isSibling = next.kind === "item" && ITEM.test(rest) && !RULE.test(rest);
      // an item of the same list stays in the list
      this.pop(isSibling ? depth : this.listless(depth));
    }
    for (;;) {
      if (state.stack.length > MAX_DEPTH) return rest;
      const quote = QUOTE.exec(rest);
      const item = RULE.test(rest) ? null : ITEM.exec(rest);
      if (quote) {
        this.pop(this.listless(state.stack.length));
        state.stack.push({ kind: "quote", node: this.add(make("blockquote")) });
        rest = quote[1];
      } else if (item && (!state.leaf || state.leaf.kind !== "text" || /^([-*+]|1[.)])/.test(item[2]) || this.top().kind === "list")) {
        this.openItem(item);
        rest = item[3];
      } else {
        if (this.top().kind === "list") this.pop(this.listless(state.stack.length));
        return rest;
      }
    }
  }

  // `size`, minus a list at the end that has no open item.
  listless(size) {
    return this.state.stack[size - 1].kind === "list" ? size - 1 : size;
  }

  openItem(item) {
    this.closeLeaf();
    const { stack } = this.state;
    const isOrdered = /\d/.test(item[2]);
    const indent = item[1].replaceAll("\t", "    ").length;
    if (this.top().kind === "list" && this.top().isOrdered !== isOrdered) stack.pop();
    if (this.top().kind !== "list") {
      const list = make(isOrdered ? "ol" : "ul");
      if (isOrdered) list.start = parseInt(item[2], 10);
      stack.push({ kind: "list", isOrdered, node: this.add(list) });
    }
    const node = this.add(make("li"));
    stack.push({ kind: "item", node, indent: indent + 2 });
  }

  // ---- code ----

  openCode(fence) {
    this.closeLeaf();
    const box = make("div", "code");
    const head = make("div", "code-head");
    const name = make("span");
    name.textContent = fence[3].trim().split(/\s/)[0].slice(0, 40);
    const copy = make("button", "copy");
    copy.type = "button";
    copy.textContent = "Copy";
    head.append(name, copy);
    const pre = make("pre");
    pre.tabIndex = 0;
    const code = make("code");
    const text = document.createTextNode("");
    code.append(text);
    pre.append(code);
    box.append(head, pre);
    this.add(box);
    const items = this.state.stack.reduce((sum, one) => sum + (one.indent ?? 0), 0);
    const strip = items + fence[1].length;
    const isQuoted = this.state.stack.some((one) => one.kind === "quote");
    // `shown` characters of the last line are in `text`, minus at most `strip` spaces of indentation
    this.state.leaf = { kind: "code", fence: fence[2], text, shown: 0, strip, toStrip: strip, isQuoted };
  }

  // Whether a line, complete or not, is certainly code and not the end of the block.
  isPlainCode(line) {
    const { leaf } = this.state;
    return leaf !== null && leaf.kind === "code" && !this.before && !leaf.isQuoted && !/^\s*[`~]*\s*$/.test(line);
  }

  addCode(line) {
    const { leaf } = this.state;
    let from = leaf.shown;
    leaf.shown = line.length;
    for (; leaf.toStrip && line[from] === " "; from++) leaf.toStrip -= 1;
    if (from < line.length) {
      leaf.toStrip = 0;
      leaf.text.appendData(line.slice(from));
    }
  }

  endCodeLine() {
    const { leaf } = this.state;
    leaf.text.appendData("\n");
    leaf.shown = 0;
    leaf.toStrip = leaf.strip;
  }

  codeLine(line) {
    const { leaf } = this.state;
    const quote = leaf.isQuoted && QUOTE.exec(line);
    const code = quote ? quote[1] : line;
    const end = code.trim();
    if (end.length >= leaf.fence.length && end === leaf.fence[0].repeat(end.length)) {
      this.state.leaf = null;
      return;
    }
    this.addCode(code);
    this.endCodeLine();
  }

  // ---- tables ----

  table(rest, isPreview) {
    const { state } = this;
    const { leaf } = state;
    if (leaf && leaf.kind === "table") {
      if (rest.includes("|")) {
        leaf.body.append(row(rest, "td", leaf.width, isPreview));
        return true;
      }
      state.leaf = null;
      return false;
    }
    if (!leaf || leaf.kind !== "text" || !rest.includes("-")) return false;
    const lines = leaf.source.split("\n");
    const head = lines[lines.length - 1];
    if (!head.includes("|")) return false;
    if (isPreview && /^[\s|:-]+$/.test(rest)) return true; // shown when the line is complete
    if (!DELIMITERS.test(rest) || cells(rest).length !== cells(head).length) return false;
    lines.pop();
    if (lines.length) {
      leaf.source = lines.join("\n");
      this.drawText(leaf, false);
    } else leaf.node.remove();
    const box = make("div", "table");
    const table = make("table");
    const top = make("thead");
    const body = make("tbody");
    const width = cells(head).length;
    top.append(row(head, "th", width, false));
    table.append(top, body);
    box.append(table);
    this.add(box);
    state.leaf = { kind: "table", node: box, body, width };
    return true;
  }
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function row(line, tag, width, isOpen) {
  const node = make("tr");
  for (const text of cells(line).slice(0, width)) {
    const cell = make(tag);
    cell.append(inline(text, isOpen));
    node.append(cell);
  }
  return node;
}

// ---- inside a line ----

const SPECIAL = /[\\`*_~[!<]|https?:\/\//g;
const LINK = /\[([^[\]]{0,400})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:\s+"[^"]{0,400}")?\s*\)/y;
const URL_TEXT = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

// A fragment of text with its emphasis, code and links. `isOpen`: more may follow, so unclosed bold
// text and code are drawn as such.
export function inline(text, isOpen = false) {
  const frames = [{ mark: "", node: document.createDocumentFragment() }];
  const top = () => frames[frames.length - 1];
  const say = (more) => {
    const last = top().node.lastChild;
    if (last && last.nodeType === Node.TEXT_NODE) last.appendData(more);
    else if (more) top().node.append(more);
  };
  // A mark that is never closed is plain text.
  const drop = () => {
    const { mark, node } = frames.pop();
    say(mark);
    const first = node.firstChild;
    if (first && first.nodeType === Node.TEXT_NODE) {
      say(first.data);
      first.remove();
    }
    top().node.append(node);
  };
  const close = () => {
    const { mark, node } = frames.pop();
    const made = make(TAGS[mark]);
    made.append(node);
    top().node.append(made);
  };
  const unclosed = new Set(); // runs of backticks that no other run closes
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) {
      say(text.slice(at));
      break;
    }
    say(text.slice(at, found.index));
    at = found.index;
    const char = text[at];
    if (char === "\\") {
      const next = text[at + 1] ?? "";
      const isEscape = /[!-/:-@[-`{-~]/.test(next);
      say(isEscape ? next : "\\");
      at += isEscape ? 2 : 1;
    } else if (char === "`") {
      const run = /`+/y;
      run.lastIndex = at;
      const ticks = run.exec(text)[0];
      const end = unclosed.has(ticks) ? -1 : findTicks(text, ticks, at + ticks.length);
      if (end < 0 && !(isOpen && ticks.length === 1)) {
        unclosed.add(ticks);
        say(ticks);
        at += ticks.length;
      } else {
        const code = make("code");
        code.textContent = text.slice(at + ticks.length, end < 0 ? text.length : end).replace(/^ (.*[^ ].*) $/s, "$1");
        top().node.append(code);
        at = end < 0 ? text.length : end + ticks.length;
      }
    } else if (char === "[" || char === "!" || char === "<" || char === "h") {
      const skip = char === "!" ? 1 : 0; // an image is shown as a link to it
      const form = char === "<" ? ANGLE : char === "h" ? URL_TEXT : LINK;
      form.lastIndex = at + skip;
      const link = form.exec(text);
      let [whole, label, address] = link ?? [];
      if (form !== LINK && link) {
        if (form === URL_TEXT) whole = whole.replace(/[.,:;!?)\]*_~]+$/, "");
        address = label ?? whole;
        label = address;
      }
      const node = link && anchor(address);
      if (node) {
        if (form === LINK) node.append(inline(label || address));
        else node.append(label);
        top().node.append(node);
        at += whole.length + skip;
      } else {
        say(char);
        at += 1;
      }
    } else {
      // Of `***` the inner mark is closed first.
      const isInner = text[at + 2] === char && top().mark === char;
      const isDouble = text[at + 1] === char && !isInner;
      const mark = isDouble ? char + char : char;
      const before = text[at - 1] ?? " ";
      const after = text[at + mark.length] ?? " ";
      const isInWord = char === "_" && /\w/.test(before) && /\w/.test(after);
      const isKnown = mark in TAGS && !isInWord;
      const place = isKnown && !/\s/.test(before) ? frames.findLastIndex((one) => one.mark === mark) : -1;
      if (place > 0 && (top().node.hasChildNodes() || place < frames.length - 1)) {
        while (frames.length - 1 > place) drop();
        close();
      } else if (isKnown && !/\s/.test(after) && frames.length < 20) {
        frames.push({ mark, node: document.createDocumentFragment() });
      } else say(mark);
      at += mark.length;
    }
  }
  while (frames.length > 1) {
    const isBegun = isOpen && top().mark.length === 2 && top().node.hasChildNodes();
    if (isBegun) close();
    else drop();
  }
  return frames[0].node;
}

function findTicks(text, ticks, from) {
  for (let at = text.indexOf(ticks, from); at >= 0; at = text.indexOf(ticks, at)) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === ticks.length) return at;
    at = end;
  }
  return -1;
}

function anchor(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const node = make("a");
  node.href = url.href;
  node.rel = "noopener noreferrer nofollow";
  node.target = "_blank";
  return node;
}
