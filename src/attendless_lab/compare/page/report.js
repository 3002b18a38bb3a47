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

const LEFT = 46, RIGHT = 12, TOP = 26, BOTTOM = 40;

function chart(parent, { title, x, y, xs, ys, logX = false, logY = false, tickX = null, height: H = 270 }) {
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
  const inside = { left: LEFT, right: width - RIGHT, top: TOP, bottom: H - BOTTOM };
  return { svg, x: sx.at, y: sy.at, inside };
}

// The table ---------------------------------------------------------------------------------------------------------

const fixed = (digits, suffix = "") => (value) => is(value) ? value.toFixed(digits) + suffix : "–";
const at = (row) => row.curve[+$("tokens").value || 0] || {};
const count = (value) => is(value) ? short(value) : "–";
const COLUMNS = [
  { name: "attention", value: (r) => r.attention, text: (v) => v, up: true },
  { name: "top-1 %", value: (r) => r.top1_mean, best: Math.max,
    text: (v, r) => is(v) ? v.toFixed(2) + (is(r.top1_std) ? ` ± ${r.top1_std.toFixed(2)}` : "") : r.failed ? "failed" : "–" },
  { name: "ms", value: (r) => at(r).ms, text: fixed(2), best: Math.min, up: true },
  { name: "speed-up", value: (r) => at(r).speedup, text: fixed(2, "×"), best: Math.max },
  { name: "MB", value: (r) => at(r).peak_memory_mb, text: fixed(1), best: Math.min, up: true },
  { name: "MACs", value: (r) => at(r).macs && at(r).macs.total, text: count, best: Math.min, up: true },
  { name: "core", value: (r) => at(r).macs && at(r).macs.core, text: count, best: Math.min, up: true },
  { name: "params", value: (r) => r.params, text: count, up: true },
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
  { title: "time", unit: "ms", of: (p) => p.ms },
  { title: "peak memory", unit: "MB", of: (p) => p.peak_memory_mb },
  { title: "multiply-accumulates", unit: "MACs", of: (p) => p.macs.total },
];

// Every variant's point at one size.
function points(place) {
  return shown.filter((r) => r.curve[place]).map((row) => ({ row, point: row.curve[place], costs: COSTS.map((c) => c.of(row.curve[place])) }));
}

function front(found) {
  const order = [...found].sort((a, b) => a.cost - b.cost || b.score - a.score);
  let best = -Infinity;
  return order.filter((p) => p.score > best && ((best = p.score), true));
}

// The lowest score an axis reaches down to: a few that lie far below all others would flatten them.
function lowest(scores) {
  const order = [...scores].sort((a, b) => a - b), top = order[order.length - 1];
  for (let i = Math.floor(order.length / 3); i > 0; i--)
    if (order.length - i >= 3 && order[i] - order[i - 1] > 1.5 * (top - order[i])) return order[i];
  return order[0];
}

// The shortest names that tell the rows apart.
function names(rows) {
  const first = rows.map((row) => row.attention.split(/[:/+]/)[0]);
  return new Map(rows.map((row, i) => [row, first.indexOf(first[i]) === first.lastIndexOf(first[i]) ? first[i] : row.attention]));
}

// Write each mark's name where it covers no other mark or name, nearest first; where there is no room the legend must do.
function write(svg, marks, inside) {
  const taken = marks.map(({ x, y }) => ({ left: x - 7, right: x + 7, top: y - 7, bottom: y + 7 }));
  const apart = (a, b) => a.right < b.left || b.right < a.left || a.bottom < b.top || b.bottom < a.top;
  for (const { x, y, text } of marks) {
    const label = make("text", { class: "name" }, svg, text), width = label.getComputedTextLength();
    const places = [10, 18, 28].flatMap((far) => [[far, 4], [-far - width, 4], [-width / 2, -far], [-width / 2, far + 8],
      [far * 0.7, -far * 0.7], [far * 0.7, far], [-far * 0.7 - width, -far * 0.7], [-far * 0.7 - width, far]]);
    const box = ([dx, dy]) => ({ left: x + dx - 2, right: x + dx + width + 2, top: y + dy - 11, bottom: y + dy + 3 });
    const place = places.find((p) => { const b = box(p); return taken.every((t) => apart(t, b)) && b.left >= inside.left && b.right <= inside.right && b.top >= inside.top && b.bottom <= inside.bottom; });
    if (!place) { label.remove(); continue; }
    label.setAttribute("x", x + place[0]); label.setAttribute("y", y + place[1]);
    taken.push(box(place));
  }
}

function drawTradeoff(parent, cost, i, height) {
  const every = points(+$("tokens").value || 0).filter(({ row, costs }) => is(row.top1_mean) && is(costs[i]));
  const found = every.map((p) => ({ ...p, cost: p.costs[i], score: p.row.top1_mean }));
  if (!found.length) return;
  const floor = lowest(found.map((p) => p.score)), xs = found.map((p) => p.cost);
  const ys = found.filter((p) => p.score >= floor).flatMap(({ row }) => [row.top1_mean - (row.top1_std || 0), row.top1_mean + (row.top1_std || 0)]);
  const c = chart(parent, { title: `top-1 % against ${cost.title}`, x: cost.unit, y: "top-1 %", xs, ys, height, logX: Math.max(...xs) > 3 * Math.min(...xs) });
  const best = front(found), called = names(found.map((p) => p.row));
  make("polyline", { points: best.map((p) => `${c.x(p.cost)},${Math.min(c.y(p.score), c.inside.bottom)}`).join(" "), fill: "none",
    stroke: "var(--soft)", "stroke-dasharray": "5 4", class: "front" }, c.svg);
  const marks = found.map(({ row, point, cost: value, score }) => {
    const below = score < floor, x = c.x(value), y = below ? c.inside.bottom - 8 : c.y(score);
    if (row.top1_std && !below) make("line", { x1: x, x2: x, y1: c.y(score - row.top1_std), y2: c.y(score + row.top1_std), stroke: look(row).colour }, c.svg);
    tip(marker(row, x, y, 6, c.svg), `${row.attention}\n${score.toFixed(2)} % · ${short(value)} ${cost.unit} at ${point.tokens ?? "?"} tokens` +
      (best.some((p) => p.row === row) ? "\non the Pareto front" : ""));
    return { x, y, text: below ? `${called.get(row)} ${score.toFixed(1)} % ↓` : called.get(row) };
  });
  write(c.svg, marks, c.inside);
}

function drawTradeoffs() {
  $("time").replaceChildren(); $("tradeoffs").replaceChildren();
  COSTS.forEach((cost, i) => drawTradeoff(i ? $("tradeoffs") : $("time"), cost, i, i ? 270 : 340));
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
  const one = rows[0].looks[place], picture = data.pictures[rows[0].setting];
  if (asked === null || !one.queries.includes(asked)) asked = (one.height >> 1) * one.width + (one.width >> 1);
  if (picture) {
    const figure = element("figure", parent), box = element("div", figure, null, { class: "picture" });
    element("img", box, null, { src: picture, alt: "the image of the maps" });
    const mark = element("i", box);
    Object.assign(mark.style, { left: `${asked % one.width / one.width * 100}%`, top: `${Math.floor(asked / one.width) / one.height * 100}%`,
      width: `${100 / one.width}%`, height: `${100 / one.height}%` });
    element("figcaption", figure, "query: the marked patch");
  }
  const tint = getComputedStyle(document.documentElement).getPropertyValue("--tint").split(",").map(Number);
  for (const row of rows) {
    const { width, height, queries, bytes: text } = row.looks[place];
    const figure = element("figure", parent), canvas = element("canvas", figure, null, { width, height, role: "img", "aria-label": `map of ${row.attention}` });
    const map = bytes(text), first = Math.max(0, queries.indexOf(asked)) * width * height;
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    for (let i = 0; i < width * height; i++) image.data.set([...tint, map[first + i]], 4 * i);
    context.putImageData(image, 0, 0);
    if (picture) {
      const box = element("div", figure, null, { class: "lit" });
      element("img", box, null, { src: picture, alt: `the image brightened by the map of ${row.attention}` });
      const shade = element("canvas", box, null, { width, height }).getContext("2d"), dark = shade.createImageData(width, height);
      for (let i = 0; i < width * height; i++) dark.data.set([0, 0, 0, 0.85 * (255 - map[first + i])], 4 * i);
      shade.putImageData(dark, 0, 0);
    }
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

// The conversion ---------------------------------------------------------------------------------------------------

function drawConversion() {
  const row = data.conversion;
  $("converted").hidden = !row;
  if (!row) return;
  $("conversion").textContent = `The model trained with full attention at ${row.trained_at.join("×")} px, as it is at ${row.size.join("×")} px ` +
    `(${row.tokens.toLocaleString("en")} tokens) and with ${row.attention} instead. ${row.images.toLocaleString("en")} images of ${row.data}: top-1 agreement ${(100 * row.agreement).toFixed(1)} %. ` +
    `Speed-up ${row.speedup.toFixed(2)}× (quartiles ${row.quartiles.map((q) => q.toFixed(2)).join("–")}); maximum ${row.cap.toFixed(1)}× (Amdahl's law, if attention cost nothing).`;
  $("bars").replaceChildren();
  const groups = [["latency, ms per image", row.dense_latency_ms, row.latency_ms], ["top-1 %", row.dense_top1, row.top1],
    ["peak memory, MB", row.dense_peak_memory_mb, row.peak_memory_mb]].filter(([, a, b]) => is(a) && is(b));
  const svg = make("svg", { role: "img", "aria-label": "latency, accuracy and memory of both" }, $("bars"));
  const width = Math.max(260, svg.getBoundingClientRect().width), name = row.attention.split(":")[0], step = 86;
  svg.setAttribute("viewBox", `0 0 ${width} ${groups.length * step}`);
  groups.forEach(([title, ...values], i) => {
    make("text", { x: 0, y: i * step + 16, class: "title" }, svg, title);
    values.forEach((value, k) => {
      const y = i * step + 24 + 26 * k, long = (width - 150) * value / Math.max(...values);
      make("text", { x: 56, y: y + 15, "text-anchor": "end" }, svg, k ? name : "full");
      make("rect", { x: 62, y, width: Math.max(1, long), height: 20, rx: 3, fill: k ? "rgb(var(--tint))" : "var(--soft)" }, svg);
      make("text", { x: 68 + long, y: y + 15, class: "title" }, svg, value.toFixed(1));
    });
  });
  $("sharp").replaceChildren();
  for (const seen of row.shown) {
    const figure = element("figure", $("sharp"));
    element("img", figure, null, { src: seen.picture, alt: "an image" });
    element("img", figure, null, { src: seen.sharp, alt: "the same, brightened where patches attend exactly" });
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
    "Same initial weights, same images in the same order, same machine.";
  const sizes = shown.map((row) => row.curve).sort((a, b) => b.length - a.length)[0] || [];
  options($("tokens"), sizes.map((p, i) => `${p.tokens ?? p.size.join("×")} tokens${i ? "" : ", as trained"}`), Math.max(0, sizes.length - 1));
  const layers = shown.map((row) => row.looks).sort((a, b) => b.length - a.length)[0] || [];
  options($("layer"), layers.map((l) => String(l.layer)), Math.max(0, layers.length - 1));
  drawTable(); drawTradeoffs(); drawLegends(); drawGrowth(); drawCurves(); drawMaps();
}

options($("setting"), settings.map((s) => describe(data.rows.find((row) => row.setting === s))));
$("choose").hidden = settings.length < 2;
$("setting").addEventListener("change", drawAll);
$("tokens").addEventListener("change", () => { drawTable(); drawTradeoffs(); });
$("layer").addEventListener("change", drawMaps);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMaps);
for (const text of data.headlines || []) element("p", $("headlines"), text, { class: "headline" });
drawConversion();
drawAll();
