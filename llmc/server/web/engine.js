// The engine, live: figures, plots, the rows of the batch and the block pool, drawn from the events
// of /v1/engine/events.

import { events } from "./api.js";
import { element } from "./messages.js";

const SPAN_S = 120; // of the plots
const RETRY_MS = 1500;
const MAX_STRIPES = 4; // requests shown per cell
const SVG = "http://www.w3.org/2000/svg";
const USED = 2;
const SHARED = 3;
const NAMES = ["blank", "cached", "used", "shared"];

const $ = (id) => document.getElementById(id);
const say = (number) => Math.round(number).toLocaleString();
const sayTime = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`);

export class EnginePanel {
  constructor({ onUp, onDown, onKey }) {
    this.tell = { onUp, onDown, onKey };
    this.abort = null;
    this.model = ""; // which model to watch, if there are several
    this.reset();
    $("blocks").addEventListener("mousemove", (event) => this.point(event));
    $("blocks").addEventListener("mouseleave", () => ($("blocks-note").textContent = this.summary));
    $("rows").addEventListener("mouseover", (event) => this.highlight(event.target.closest("li")?.dataset.number));
    $("rows").addEventListener("mouseleave", () => this.highlight(undefined));
    new ResizeObserver(() => this.drawBlocks()).observe($("blocks"));
  }

  reset() {
    this.last = null;
    this.rates = []; // {time, value}: tokens generated per second
    this.between = []; // mean seconds between two tokens of a request
    this.first = []; // seconds to the first token, one entry per request
    this.known = new Set(); // requests whose first token is in `first`
    this.summary = "";
  }

  watch(isWatched) {
    if (isWatched && !this.abort) {
      this.abort = new AbortController();
      this.run(this.abort.signal);
    } else if (!isWatched && this.abort) {
      this.abort.abort();
      this.abort = null;
      this.last = null; // restart the rates
    }
  }

  async run(signal) {
    while (!signal.aborted) {
      try {
        for await (const event of events(`/v1/engine/events?model=${encodeURIComponent(this.model)}`, { signal })) {
          this.tell.onUp();
          if (event.error) this.note(event.error.message);
          else this.take(event);
        }
      } catch (error) {
        if (signal.aborted) return;
        this.note(error instanceof TypeError ? "The server can't be reached; trying again." : error.message);
        if (error.status === 401) await this.tell.onKey();
      }
      if (signal.aborted) return;
      this.last = null;
      this.tell.onDown("reconnecting");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  note(text) {
    $("engine-note").textContent = text;
    $("engine-note").hidden = !text;
  }

  take(state) {
    this.note("");
    const { last } = this;
    const isNew = !last || state.stats.num_steps < last.stats.num_steps || state.time_s <= last.time_s;
    if (isNew && last) this.known.clear();
    const seconds = isNew ? 0 : state.time_s - last.time_s;
    const rate = (name) => (isNew ? 0 : (state.stats[name] - last.stats[name]) / seconds);
    this.followRequests(state, isNew ? null : last, seconds);
    if (!isNew) this.rates.push({ time: state.time_s, value: rate("num_generated_tokens") });
    for (const series of [this.rates, this.between, this.first]) {
      while (series.length && series[0].time < state.time_s - SPAN_S) series.shift();
    }
    this.last = state;
    this.drawFigures(state, rate);
    const { time_s: now } = state;
    plot($("plot-rate"), this.rates, now, { label: "Tokens generated per second", write: say });
    plot($("plot-first"), this.first, now, { label: "Time to first token, one dot per request", write: sayTime, isDots: true });
    plot($("plot-between"), this.between, now, { label: "Mean time between two tokens of a request", write: sayTime });
    this.drawRows(state);
    this.drawBlocks();
  }

  followRequests(state, last, seconds) {
    const before = new Map(last?.requests.map((one) => [one.number, one]));
    const times = [];
    this.speeds = new Map();
    for (const one of state.requests) {
      const drawn = one.num_output_tokens - (before.get(one.number)?.num_output_tokens ?? one.num_output_tokens);
      if (drawn <= 0) continue;
      times.push(seconds / drawn);
      this.speeds.set(one.number, drawn / seconds);
    }
    if (times.length) this.between.push({ time: state.time_s, value: times.reduce((sum, one) => sum + one) / times.length });
    for (const one of [...state.finished, ...state.requests]) {
      if (one.first_token_s === null || this.known.has(one.number)) continue;
      this.known.add(one.number);
      if (last) this.first.push({ time: state.time_s, value: one.first_token_s });
    }
  }

  drawFigures({ stats, num_rows: rows }, rate) {
    const share = (part, all) => (all ? `${((100 * part) / all).toFixed(0)} %` : "–");
    const figures = [
      ["generated", `${say(rate("num_generated_tokens"))}`, "tokens/s"],
      ["prompts", `${say(rate("num_prompt_tokens"))}`, "tokens/s"],
      ["running", `${stats.num_running}`, `of ${rows} rows`],
      ["waiting", `${stats.num_waiting}`, "requests"],
      ["preempted", `${stats.num_preemptions}`, stats.num_swaps ? `${stats.num_swaps} swapped` : "times"],
      ["prefix hits", share(stats.prefix_cache_hits, stats.prefix_cache_queries), "of prompt tokens"],
    ];
    if (stats.num_draft_tokens) figures.push(["drafts", share(stats.num_accepted_tokens, stats.num_draft_tokens), "of draft tokens accepted"]);
    const made = figures.map(([name, value, unit]) => element("div", {}, element("dt", {}, name), element("dd", {}, element("b", {}, value), ` ${unit}`)));
    $("figures").replaceChildren(...made);
  }

  drawRows(state) {
    const most = Math.max(64, ...state.requests.map((one) => one.num_prompt_tokens + one.num_output_tokens));
    const items = state.requests.map((one) => {
      const computed = Math.min(one.num_computed_tokens, one.num_prompt_tokens);
      const cached = Math.min(one.num_cached_tokens, computed);
      const bar = element("div", { className: "bar" });
      for (const [kind, tokens] of [["cached", cached], ["prompt", computed - cached], ["rest", one.num_prompt_tokens - computed], ["output", one.num_output_tokens]]) {
        const part = element("i", { className: kind });
        part.style.width = `${(100 * tokens) / most}%`;
        bar.append(part);
      }
      const dot = element("i", { className: "dot" });
      dot.style.background = one.state === "running" ? hue(one) : "";
      const speed = this.speeds.get(one.number);
      const doing = one.state !== "running" ? one.state : computed < one.num_prompt_tokens ? "prefill" : speed ? `${speed.toFixed(0)} tokens/s` : "decode";
      const text = `${say(one.num_prompt_tokens)} + ${say(one.num_output_tokens)}`;
      const title = `${one.num_prompt_tokens} prompt tokens, ${one.num_cached_tokens} of them cached; ${one.num_output_tokens} generated; ${one.age_s.toFixed(1)} s old`;
      return element("li", { className: one.state, title, "data-number": String(one.number) }, dot, element("span", {}, `${one.row === null ? "" : `row ${one.row} · `}#${one.number}`), bar, element("span", { className: "count" }, text), element("span", { className: "doing" }, doing));
    });
    const more = state.stats.num_running + state.stats.num_waiting - items.length;
    if (more > 0) items.push(element("li", { className: "none" }, `and ${more} more`));
    if (!items.length) items.push(element("li", { className: "none" }, "No requests."));
    $("rows").replaceChildren(...items);
  }

  // ---- the block pool ----

  highlight(number) {
    this.marked = number === undefined ? undefined : Number(number);
    this.drawBlocks();
  }

  // [the state of each cell, the requests known to use it]
  cells() {
    const { blocks, requests } = this.last;
    const states = [];
    for (let i = 0; i < blocks.runs.length; i += 2) for (let n = 0; n < blocks.runs[i + 1]; n++) states.push(blocks.runs[i]);
    const owners = states.map(() => []);
    for (const one of requests) {
      for (let i = 0; i < one.block_runs.length; i += 2) {
        const from = Math.floor(one.block_runs[i] / blocks.blocks_per_cell);
        const to = Math.floor((one.block_runs[i] + one.block_runs[i + 1] - 1) / blocks.blocks_per_cell);
        for (let cell = from; cell <= to; cell++) if (!owners[cell].includes(one)) owners[cell].push(one);
      }
    }
    return [states, owners];
  }

  drawBlocks() {
    if (!this.last) return;
    const canvas = $("blocks");
    const width = canvas.clientWidth;
    if (!width) return;
    const [states, owners] = this.cells();
    const { blocks, block_size: size } = this.last;
    const cell = Math.max(7, Math.min(14, Math.sqrt((width * 190) / states.length)));
    const columns = Math.floor(width / cell);
    const height = Math.ceil(states.length / columns) * cell;
    const scale = devicePixelRatio;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const colours = NAMES.map((name) => getComputedStyle(document.querySelector(`.legend .${name}`)).backgroundColor);
    const ink = getComputedStyle(canvas).color;
    const inner = cell - 1.5;
    states.forEach((state, at) => {
      const x = (at % columns) * cell;
      const y = Math.floor(at / columns) * cell;
      const users = state >= USED ? owners[at].slice(0, MAX_STRIPES) : [];
      paint.globalAlpha = this.marked === undefined || owners[at].some((owner) => owner.number === this.marked) ? 1 : 0.25;
      paint.fillStyle = colours[state === SHARED ? USED : state];
      paint.fillRect(x, y, inner, inner);
      users.forEach((one, place) => {
        paint.fillStyle = hue(one);
        paint.fillRect(x + (place * inner) / users.length, y, inner / users.length, inner);
      });
      if (state !== SHARED) return;
      paint.strokeStyle = ink;
      paint.lineWidth = 1.5;
      paint.strokeRect(x + 0.75, y + 0.75, inner - 1.5, inner - 1.5);
    });
    this.grid = { cell, columns, states, owners };
    for (const count of document.querySelectorAll("[data-count]")) count.textContent = say(blocks[count.dataset.count]);
    const each = blocks.blocks_per_cell > 1 ? `One cell is ${blocks.blocks_per_cell} blocks of ${size} tokens.` : `One cell is a block of ${size} tokens.`;
    const saved = blocks.num_saved ? ` Sharing saves ${say(blocks.num_saved)} blocks.` : "";
    this.summary = each + saved;
    $("blocks-note").textContent = this.summary;
    canvas.setAttribute("aria-label", `${blocks.num_blank} blocks are blank, ${blocks.num_cached} cached, ${blocks.num_used} used, ${blocks.num_shared} of these shared by several requests.${saved}`);
  }

  point(event) {
    if (!this.grid) return;
    const { cell, columns, states, owners } = this.grid;
    const column = Math.floor(event.offsetX / cell);
    const at = Math.floor(event.offsetY / cell) * columns + column;
    if (column >= columns || at >= states.length) return;
    const width = this.last.blocks.blocks_per_cell;
    const name = width > 1 ? `Blocks ${at * width} to ${at * width + width - 1}` : `Block ${at}`;
    const users = owners[at].map((one) => `#${one.number}`).join(", ");
    $("blocks-note").textContent = `${name}: ${NAMES[states[at]]}${users ? ` by ${users}` : ""}`;
  }
}

// A color for each request; neighbors differ.
function hue(one) {
  return `hsl(${(one.number * 137) % 360} 55% 52%)`;
}

function plot(svg, series, now, { label, write, isDots = false }) {
  const width = svg.clientWidth || 300;
  const height = svg.clientHeight || 56;
  const top = Math.max(0, ...series.map((one) => one.value));
  const x = (time) => width * (1 - (now - time) / SPAN_S);
  const y = (value) => height - 3 - (top ? (value / top) * (height - 22) : 0);
  const draw = (tag, attributes) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const made = [draw("line", { x1: 0, x2: width, y1: height - 3, y2: height - 3, class: "axis" })];
  if (isDots) for (const one of series) made.push(draw("circle", { cx: x(one.time), cy: y(one.value), r: 3 }));
  else if (series.length > 1) {
    const points = series.map((one) => `${x(one.time).toFixed(1)},${y(one.value).toFixed(1)}`);
    const ends = `${x(series.at(-1).time).toFixed(1)},${height - 3} ${x(series[0].time).toFixed(1)},${height - 3}`;
    made.push(draw("polygon", { points: `${points.join(" ")} ${ends}` }), draw("polyline", { points: points.join(" ") }));
  }
  const text = draw("text", { x: width - 2, y: 11, "text-anchor": "end" });
  const latest = series.at(-1);
  text.textContent = latest ? `now ${write(latest.value)} · max ${write(top)}` : "nothing yet";
  made.push(text);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${label}, last ${SPAN_S} s: ${text.textContent}`);
  svg.replaceChildren(...made);
}
