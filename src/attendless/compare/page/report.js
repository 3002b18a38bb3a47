"use strict";
// Everything on the page is drawn from the rows in #data; nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SHAPES = ["circle", "square", "triangle", "diamond", "down", "cross"];
let shown = [];

// Small helpers -----------------------------------------------------------------------------------------------------

function make(name, attributes = {}, parent = null, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function element(name, parent, text = null, attributes = {}) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

const is = (value) => value !== null && value !== undefined;

function short(value) {
  const steps = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  for (const [unit, letter] of steps) if (Math.abs(value) >= unit) return +(value / unit).toPrecision(3) + letter;
  return String(+value.toPrecision(3));
}

// Black vanishes on a dark ground, so the palette's black is the page's ink. Shapes tell apart what colours do not.
function look(row) {
  const i = shown.indexOf(row);
  const colour = data.colours[i % data.colours.length];
  return { colour: colour === "#000000" ? "var(--ink)" : colour, shape: SHAPES[i % SHAPES.length] };
}

function marker(row, x, y, size, parent) {
  const { colour, shape } = look(row), s = size;
  const paths = {
    circle: `M${x - s} ${y}a${s} ${s} 0 1 0 ${2 * s} 0a${s} ${s} 0 1 0 ${-2 * s} 0`,
    square: `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    triangle: `M${x} ${y - 1.2 * s}l${1.2 * s} ${2.1 * s}h${-2.4 * s}z`,
    diamond: `M${x} ${y - 1.3 * s}l${1.3 * s} ${1.3 * s}l${-1.3 * s} ${1.3 * s}l${-1.3 * s} ${-1.3 * s}z`,
    down: `M${x} ${y + 1.2 * s}l${1.2 * s} ${-2.1 * s}h${-2.4 * s}z`,
    cross: `M${x - s} ${y - s / 3}h${s * 2 / 3}v${-s * 2 / 3}h${s * 2 / 3}v${s * 2 / 3}h${s * 2 / 3}v${s * 2 / 3}h${-s * 2 / 3}v${s * 2 / 3}h${-s * 2 / 3}v${-s * 2 / 3}h${-s * 2 / 3}z`,
  };
  return make("path", { d: paths[shape], fill: colour, stroke: "var(--ground)", "stroke-width": 1 }, parent);
}

function tip(node, text) {
  const show = (event) => {
    const box = $("tip"), at = event.clientX === undefined ? node.getBoundingClientRect() : null;
    const [x, y] = at ? [at.right, at.top] : [event.clientX, event.clientY];
    box.textContent = text;
    box.hidden = false;
    box.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.offsetWidth - 4)) + "px";
    box.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.offsetHeight - 4)) + "px";
  };
  node.setAttribute("tabindex", "0");
  node.setAttribute("aria-label", text);
  node.classList.add("mark");
  for (const event of ["pointerenter", "pointermove", "focus"]) node.addEventListener(event, show);
  for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => { $("tip").hidden = true; });
}

// Axes --------------------------------------------------------------------------------------------------------------

function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of [1, 2, 5]) {
        const value = digit * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    if (found.length > 6) return found.filter((v) => /^1/.test(v.toExponential()));
    if (found.length > 1) return found;
  }
  const step = 10 ** Math.floor(Math.log10((high - low) / 4));
  const nice = [1, 2, 5, 10].map((n) => n * step).find((s) => (high - low) / s <= 6);
  const found = [];
  for (let value = Math.ceil(low / nice) * nice; value <= high + nice / 1e6; value += nice) found.push(+value.toPrecision(12));
  return found;
}

// As short as tells them apart.
function labels(values) {
  const found = values.map(short);
  return values.map((value, i) => [value, new Set(found).size < found.length ? String(+value.toPrecision(6)) : found[i]]);
}

function scale(values, from, to, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) { low /= 1.15; high *= 1.15; } else {
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    low -= room; high += room;
  }
  const f = log ? Math.log : (v) => v;
  const at = (value) => from + (f(value) - f(low)) / (f(high) - f(low)) * (to - from);
  return { at, ticks: ticks(low, high, log) };
}

const H = 270, LEFT = 46, RIGHT = 12, TOP = 26, BOTTOM = 40;

function chart(parent, { title, x, y, xs, ys, logX = false, logY = false, tickX = null }) {
  const svg = make("svg", { role: "img", "aria-label": `${title}: ${y} against ${x}` }, parent);
  const width = Math.max(260, svg.getBoundingClientRect().width);
  svg.setAttribute("viewBox", `0 0 ${width} ${H}`);
  const sx = scale(xs, LEFT, width - RIGHT, logX), sy = scale(ys, H - BOTTOM, TOP, logY);
  make("text", { x: LEFT, y: 14, class: "title" }, svg, title);
  const across = tickX ? tickX.map((v) => [v, String(v)]) : labels(sx.ticks), up = labels(sy.ticks);
  for (const [value, label] of across) {
    make("line", { x1: sx.at(value), x2: sx.at(value), y1: TOP, y2: H - BOTTOM, class: "axis" }, svg);
    make("text", { x: sx.at(value), y: H - BOTTOM + 15, "text-anchor": "middle" }, svg, label);
  }
  for (const [value, label] of up) {
    make("line", { x1: LEFT, x2: width - RIGHT, y1: sy.at(value), y2: sy.at(value), class: "axis" }, svg);
    make("text", { x: LEFT - 6, y: sy.at(value) + 4, "text-anchor": "end" }, svg, label);
  }
  make("text", { x: (LEFT + width - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, svg, x);
  return { svg, x: sx.at, y: sy.at };
}

// The table ---------------------------------------------------------------------------------------------------------

const fixed = (digits, suffix = "") => (value) => is(value) ? value.toFixed(digits) + suffix : "–";
const COLUMNS = [
  { name: "attention", value: (r) => r.attention, text: (v) => v, up: true },
  { name: "top-1 %", value: (r) => r.top1_mean, best: Math.max,
    text: (v, r) => is(v) ? v.toFixed(2) + (is(r.top1_std) ? ` ± ${r.top1_std.toFixed(2)}` : "") : r.failed ? "failed" : "–" },
  { name: "params", value: (r) => r.params, text: (v) => is(v) ? short(v) : "–", up: true },
  { name: "MACs", value: (r) => r.macs && r.macs.total, text: (v) => is(v) ? short(v) : "–", best: Math.min, up: true },
  { name: "core", value: (r) => r.macs && r.macs.core, text: (v) => is(v) ? short(v) : "–", best: Math.min, up: true },
  { name: "ms", value: (r) => r.ms, text: fixed(2), best: Math.min, up: true },
  { name: "speed-up", value: (r) => r.speedup, text: fixed(2, "×"), best: Math.max },
  { name: "MB", value: (r) => r.peak_memory_mb, text: fixed(1), best: Math.min, up: true },
  { name: "images/s", value: (r) => r.throughput, text: fixed(0), best: Math.max },
];
let sorted = { column: 1, up: false };

function drawTable() {
  const head = $("table").tHead, body = $("table").tBodies[0];
  head.replaceChildren(); body.replaceChildren();
  const line = element("tr", head);
  COLUMNS.forEach((column, i) => {
    const state = sorted.column === i ? (sorted.up ? "ascending" : "descending") : "none";
    const cell = element("th", line, column.name, { "aria-sort": state, tabindex: "0", scope: "col" });
    const sort = () => {
      sorted = { column: i, up: sorted.column === i ? !sorted.up : Boolean(column.up) };
      drawTable();
      $("table").tHead.rows[0].cells[i].focus({ preventScroll: true });
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
  });
  const by = COLUMNS[sorted.column].value;
  const order = [...shown].sort((a, b) => {
    const [u, v] = [by(a), by(b)];
    if (!is(u) || !is(v)) return is(u) ? -1 : is(v) ? 1 : 0;
    return (typeof u === "string" ? u.localeCompare(v) : u - v) * (sorted.up ? 1 : -1);
  });
  for (const row of order) {
    const cells = element("tr", body);
    COLUMNS.forEach((column) => {
      const value = column.value(row);
      const known = shown.map(column.value).filter(is);
      const best = column.best && is(value) && column.text(value, row) === column.text(column.best(...known), row);
      element("td", cells, column.text(value, row), best ? { class: "best" } : {});
    });
  }
  $("notes").replaceChildren();
  for (const row of shown) {
    if (row.failed) element("p", $("notes"), `${row.attention} failed: ${row.failed}`);
    for (const note of row.notes || []) element("p", $("notes"), `${row.attention}: ${note}`);
  }
}

// Figures -----------------------------------------------------------------------------------------------------------

const COSTS = [
  { title: "multiply-accumulates", unit: "MACs", of: (p) => p.macs.total },
  { title: "time", unit: "ms", of: (p, dense) => dense / p.speedup },
  { title: "peak memory", unit: "MB", of: (p) => p.peak_memory_mb },
];

function median(values) {
  const found = [...values].sort((a, b) => a - b), middle = found.length >> 1;
  return found.length % 2 ? found[middle] : (found[middle - 1] + found[middle]) / 2;
}

// Every contestant's point at one size, its time on the clock of the median dense model.
function points(place) {
  const found = shown.filter((r) => r.curve[place]).map((row) => ({ row, point: row.curve[place] }));
  const dense = found.length ? median(found.map((f) => f.point.dense_latency_ms)) : 0;
  return found.map(({ row, point }) => ({ row, point, costs: COSTS.map((c) => c.of(point, dense)) }));
}

function front(found) {
  const order = [...found].sort((a, b) => a.cost - b.cost || b.score - a.score);
  let best = -Infinity;
  return order.filter((p) => p.score > best && ((best = p.score), true));
}

function drawTradeoffs() {
  $("tradeoffs").replaceChildren();
  const every = points(+$("tokens").value || 0).filter(({ row }) => is(row.top1_mean));
  COSTS.forEach((cost, i) => {
    const found = every.filter((p) => is(p.costs[i])).map((p) => ({ ...p, cost: p.costs[i], score: p.row.top1_mean }));
    if (!found.length) return;
    const deviations = found.flatMap(({ row }) => [row.top1_mean - (row.top1_std || 0), row.top1_mean + (row.top1_std || 0)]);
    const c = chart($("tradeoffs"), { title: `top-1 % against ${cost.title}`, x: cost.unit, y: "top-1 %",
      xs: found.map((p) => p.cost), ys: deviations, logX: i < 2 && Math.max(...found.map((p) => p.cost)) > 3 * Math.min(...found.map((p) => p.cost)) });
    const best = front(found);
    make("polyline", { points: best.map((p) => `${c.x(p.cost)},${c.y(p.score)}`).join(" "), fill: "none",
      stroke: "var(--soft)", "stroke-dasharray": "5 4", class: "front" }, c.svg);
    for (const { row, point, cost: value, score } of found) {
      const x = c.x(value), y = c.y(score);
      if (row.top1_std) make("line", { x1: x, x2: x, y1: c.y(score - row.top1_std), y2: c.y(score + row.top1_std), stroke: look(row).colour }, c.svg);
      tip(marker(row, x, y, 6, c.svg), `${row.attention}\n${score.toFixed(2)} % · ${short(value)} ${cost.unit} at ${point.tokens ?? "?"} tokens` +
        (best.some((p) => p.row === row) ? "\non the Pareto front" : ""));
    }
  });
}

function drawLegends() {
  for (const legend of document.querySelectorAll(".legend")) {
    legend.replaceChildren();
    for (const row of shown) {
      const item = element("span", legend);
      marker(row, 8, 8, 5, make("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, item));
      item.append(row.attention);
    }
  }
}

function drawGrowth() {
  $("growth").replaceChildren();
  const most = Math.max(0, ...shown.map((r) => r.curve.length));
  const sizes = Array.from({ length: most }, (_, place) => points(place));
  COSTS.forEach((cost, i) => {
    const lines = shown.map((row) => ({ row, line: sizes.flatMap((at) => at.filter((p) => p.row === row && is(p.costs[i]) && is(p.point.tokens))
      .map((p) => [p.point.tokens, p.costs[i]])) })).filter(({ line }) => line.length);
    const all = lines.flatMap(({ line }) => line);
    if (!all.length) return;
    const tokens = [...new Set(all.map(([n]) => n))].sort((a, b) => a - b);
    const c = chart($("growth"), { title: cost.title, x: "tokens", y: cost.unit, xs: tokens, ys: all.map((p) => p[1]), logX: true, logY: true, tickX: tokens });
    for (const { row, line } of lines) {
      make("polyline", { points: line.map(([n, v]) => `${c.x(n)},${c.y(v)}`).join(" "), fill: "none", stroke: look(row).colour, "stroke-width": 1.6 }, c.svg);
      for (const [n, v] of line) tip(marker(row, c.x(n), c.y(v), 4, c.svg), `${row.attention}\n${short(v)} ${cost.unit} at ${n} tokens`);
    }
  });
}

function drawCurves() {
  $("curves").replaceChildren();
  for (const [key, title] of [["top1", "top-1 %"], ["val_loss", "validation loss"]]) {
    const lines = shown.map((row) => {
      const epochs = [...new Set(row.curves.flat().filter((p) => is(p[key])).map((p) => p.epoch))].sort((a, b) => a - b);
      return { row, line: epochs.map((epoch) => {
        const values = row.curves.flat().filter((p) => p.epoch === epoch && is(p[key])).map((p) => p[key]);
        return { epoch, mean: values.reduce((a, b) => a + b) / values.length, low: Math.min(...values), high: Math.max(...values) };
      }) };
    }).filter(({ line }) => line.length);
    if (!lines.length) continue;
    const all = lines.flatMap(({ line }) => line);
    const epochs = [...new Set(all.map((p) => p.epoch))].sort((a, b) => a - b);
    const c = chart($("curves"), { title, x: "epoch", y: title, xs: epochs, ys: all.flatMap((p) => [p.low, p.high]), tickX: epochs.length <= 8 ? epochs : null });
    for (const { row, line } of lines) {
      const { colour } = look(row);
      const band = [...line.map((p) => [p.epoch, p.high]), ...[...line].reverse().map((p) => [p.epoch, p.low])];
      make("polygon", { points: band.map(([e, v]) => `${c.x(e)},${c.y(v)}`).join(" "), fill: colour, opacity: 0.16 }, c.svg);
      make("polyline", { points: line.map((p) => `${c.x(p.epoch)},${c.y(p.mean)}`).join(" "), fill: "none", stroke: colour, "stroke-width": 1.8 }, c.svg);
      for (const p of line) tip(marker(row, c.x(p.epoch), c.y(p.mean), 3.5, c.svg), `${row.attention}, epoch ${p.epoch}\n${title} ${p.mean.toFixed(2)} (${p.low.toFixed(2)} to ${p.high.toFixed(2)})`);
    }
  }
}

// Maps --------------------------------------------------------------------------------------------------------------

let asked = null;

function bytes(text) {
  const raw = atob(text), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

function drawMaps() {
  const place = +$("layer").value, parent = $("maps");
  parent.replaceChildren();
  const rows = shown.filter((row) => row.looks[place]);
  $("seen").hidden = !rows.length;
  if (!rows.length) return;
  const first = rows[0].looks[place], picture = data.pictures[rows[0].setting];
  if (asked === null || !first.queries.includes(asked)) asked = (first.height >> 1) * first.width + (first.width >> 1);
  if (picture) {
    const figure = element("figure", parent), box = element("div", figure, null, { class: "picture" });
    element("img", box, null, { src: picture, alt: "the picture the maps are of" });
    const mark = element("i", box);
    Object.assign(mark.style, { left: `${asked % first.width / first.width * 100}%`, top: `${Math.floor(asked / first.width) / first.height * 100}%`,
      width: `${100 / first.width}%`, height: `${100 / first.height}%` });
    element("figcaption", figure, "asked from the marked patch");
  }
  const tint = getComputedStyle(document.documentElement).getPropertyValue("--tint").split(",").map(Number);
  for (const row of rows) {
    const { width, height, queries, bytes: text } = row.looks[place];
    const figure = element("figure", parent), canvas = element("canvas", figure, null, { width, height, role: "img", "aria-label": `map of ${row.attention}` });
    const map = bytes(text), at = Math.max(0, queries.indexOf(asked)) * width * height;
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    for (let i = 0; i < width * height; i++) image.data.set([...tint, map[at + i]], 4 * i);
    context.putImageData(image, 0, 0);
    element("figcaption", figure, row.attention);
    const ask = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.min(width - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * width)));
      const line = Math.min(height - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * height)));
      if (queries.includes(line * width + column) && asked !== line * width + column) { asked = line * width + column; drawMaps(); }
    };
    canvas.addEventListener("pointermove", ask);
    canvas.addEventListener("pointerdown", ask);
  }
}

// The page ----------------------------------------------------------------------------------------------------------

function options(select, labels, chosen = 0) {
  select.replaceChildren();
  labels.forEach((label, i) => element("option", select, label, { value: i }));
  select.value = chosen;
}

const settings = [...new Set(data.rows.map((row) => row.setting))];

function describe(row) {
  const patch = row.patch ? ` with patches of ${row.patch}` : "", size = row.size ? ` at ${row.size.join("×")} px` : "";
  return `${row.model}${patch}${size}, trained on ${row.data} by the recipe ${row.recipe}`;
}

function drawAll() {
  shown = data.rows.filter((row) => row.setting === settings[+$("setting").value || 0]);
  const seeds = Math.max(...shown.map((row) => row.seeds.length));
  $("lead").textContent = `${shown.length} attentions in ${describe(shown[0])}, from ${seeds} seed${seeds === 1 ? "" : "s"}. ` +
    "Same initial weights, same order of the same pictures, same machine.";
  const sizes = shown.map((row) => row.curve).sort((a, b) => b.length - a.length)[0] || [];
  options($("tokens"), sizes.map((p, i) => `${p.tokens ?? p.size.join("×")} tokens${i ? "" : ", as trained"}`));
  const layers = shown.map((row) => row.looks).sort((a, b) => b.length - a.length)[0] || [];
  options($("layer"), layers.map((l) => String(l.layer)), Math.max(0, layers.length - 1));
  drawTable(); drawTradeoffs(); drawLegends(); drawGrowth(); drawCurves(); drawMaps();
}

options($("setting"), settings.map((s) => describe(data.rows.find((row) => row.setting === s))));
$("choose").hidden = settings.length < 2;
$("setting").addEventListener("change", drawAll);
$("tokens").addEventListener("change", drawTradeoffs);
$("layer").addEventListener("change", drawMaps);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);
drawAll();
