"use strict";
const data = JSON.parse(document.getElementById("chart-data").textContent);
const byId = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* A canvas as sharp as the screen; what draws gets its size in CSS pixels. */
function canvas(id, height, draw) {
  const element = byId(id), context = element.getContext("2d");
  const again = () => {
    const width = element.clientWidth, ratio = window.devicePixelRatio || 1, tall = height();
    element.style.height = `${tall}px`;
    element.width = Math.round(width * ratio);
    element.height = Math.round(tall * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.clearRect(0, 0, width, tall);
    draw(context, width, tall);
  };
  new ResizeObserver(again).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  return [element, again];
}

/* Wheel and drag over a range [from, to) of `all`, along one direction; `fewest` that stay in sight. */
function ranged(element, all, fewest, along, view, again) {
  const clamp = (from, size) => {
    size = Math.min(all, Math.max(Math.min(fewest, all), size));
    view.from = Math.min(Math.max(0, from), all - size);
    view.to = view.from + size;
    again();
  };
  element.addEventListener("wheel", (event) => {
    event.preventDefault();
    const size = view.to - view.from, at = view.from + size * along(event);
    const wanted = size * Math.exp(Math.sign(event.deltaY) * 0.25);
    clamp(at - (at - view.from) * wanted / size, wanted);
  }, { passive: false });
  let held = null;
  element.addEventListener("pointerdown", (event) => { held = [along(event), view.from]; element.setPointerCapture(event.pointerId); });
  element.addEventListener("pointerup", () => { held = null; });
  element.addEventListener("pointermove", (event) => {
    if (held) clamp(held[1] - (along(event) - held[0]) * (view.to - view.from), view.to - view.from);
  });
  return clamp;
}

function place(rank) {
  const words = [];
  let rest = rank;
  for (const [axis, size] of [...data.mesh].reverse()) {
    words.unshift(`${axis}=${rest % size}`);
    rest = Math.floor(rest / size);
  }
  return words.length ? ` (${words.join(" ")})` : "";
}

/* ---------------------------------------------------------------- ranks and steps */
const count = data.ranks.length, columns = data.columns.length;
const layers = data.layers.map((layer) => ({ ...layer, values: Uint8Array.from(atob(layer.bytes), (c) => c.charCodeAt(0)) }));
const rows = { from: 0, to: count };
let layer = layers[0];
const LEFT = 74;

/* From what is usual, pale, to what is long, dark. */
function colour(value) {
  if (value === 0) return null;
  const x = (value - 1) / 254, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const from = dark ? [38, 44, 56] : [232, 238, 246], mid = dark ? [66, 120, 190] : [92, 144, 206], to = dark ? [255, 120, 90] : [190, 30, 30];
  const [a, b, t] = x < 0.5 ? [from, mid, x * 2] : [mid, to, x * 2 - 1];
  return a.map((one, i) => Math.round(one + (b[i] - one) * t));
}

function highest(row, until, column) {
  let found = 0, at = row;
  for (let i = row; i < until; i++) {
    const value = layer.values[i * columns + column];
    if (value > found) [found, at] = [value, i];
  }
  return [found, at];
}

const inside = (y, height) => Math.min(height - 8, Math.max(8, y));

function drawRanks(context, width, height) {
  const wide = width - LEFT, shown = rows.to - rows.from, lines = Math.max(1, Math.min(Math.round(height), Math.ceil(shown)));
  const image = new ImageData(columns, lines), table = Array.from({ length: 256 }, (_, value) => colour(value));
  for (let line = 0; line < lines; line++) {
    const from = Math.floor(rows.from + shown * line / lines), until = Math.max(from + 1, Math.floor(rows.from + shown * (line + 1) / lines));
    for (let column = 0; column < columns; column++) {
      const rgb = table[highest(from, Math.min(until, count), column)[0]];
      if (rgb) image.data.set([...rgb, 255], (line * columns + column) * 4);
    }
  }
  const small = new OffscreenCanvas(columns || 1, lines);
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, LEFT, 0, wide, height);
  context.fillStyle = style("--soft");
  context.textBaseline = "middle";
  const marked = data.blamed.map((rank) => (data.ranks.indexOf(rank) + 0.5 - rows.from) / shown * height);
  const each = Math.max(1, Math.ceil(shown * 18 / height));
  for (let row = Math.ceil(rows.from / each) * each; row < rows.to; row += each) {
    const y = inside((row + 0.5 - rows.from) / shown * height, height);
    if (!marked.some((other) => Math.abs(other - y) < 16)) context.fillText(`rank ${data.ranks[row]}`, 0, y);
  }
  context.fillStyle = style("--bad");
  for (const rank of data.blamed) {
    const row = data.ranks.indexOf(rank);
    if (row >= rows.from && row < rows.to) {
      const y = (row - rows.from) / shown * height, tall = Math.max(3, height / shown);
      context.fillRect(LEFT - 6, y, 4, tall);
      context.fillText(`rank ${rank}`, 0, inside(y + tall / 2, height));
    }
  }
  byId("range").textContent = `ranks ${data.ranks[Math.floor(rows.from)]} to ${data.ranks[Math.ceil(rows.to) - 1]} of ${count}; ` +
    `pale: ${layer.least.toFixed(1)} ms, darkest: ${layer.most.toFixed(1)} ms or more` + (columns < data.steps.length ? "; a column is the slowest of several steps" : "");
}

const [ranksElement, ranksAgain] = canvas("ranks", () => Math.min(560, Math.max(120, count * 26)), drawRanks);
const clampRanks = ranged(ranksElement, count, Math.min(count, 4), (event) => event.offsetY / ranksElement.clientHeight, rows, ranksAgain);
ranksElement.addEventListener("pointermove", (event) => {
  const shown = rows.to - rows.from, height = ranksElement.clientHeight;
  const column = Math.floor((event.offsetX - LEFT) / (ranksElement.clientWidth - LEFT) * columns);
  if (column < 0 || column >= columns) return;
  const from = Math.floor(rows.from + shown * event.offsetY / height);
  const until = Math.max(from + 1, Math.floor(rows.from + shown * (event.offsetY + 1) / height));
  const [value, row] = highest(from, Math.min(until, count), column);
  const last = column + 1 < columns ? data.columns[column + 1] - 1 : data.steps.length - 1;
  const step = data.steps[data.columns[column]], end = data.steps[last];
  byId("cell").textContent = `${until - from > 1 ? `slowest of ${until - from} ranks: ` : ""}rank ${data.ranks[row]}${place(data.ranks[row])}, ` +
    `step ${step}${end > step ? ` to ${end}` : ""}: ` +
    (value ? `${layer.name} ${{ 1: "at most ", 255: "at least " }[value] ?? ""}${(layer.least + (value - 1) / 254 * (layer.most - layer.least)).toFixed(2)} ms` : "nothing recorded");
});
byId("all").addEventListener("click", () => clampRanks(0, count));
for (const [at, one] of layers.entries()) byId("layer").add(new Option(one.name, at));
byId("layer").addEventListener("change", (event) => { layer = layers[event.target.value]; ranksAgain(); });

/* ---------------------------------------------------------------- call by call */
const { ranks: lanes, words, kinds } = data.lanes;
const SHADES = ["#8a8f98", "#b78a2a", "#2f7fbf", "#7a5bb5", "#4c8f7a", "#3d8f4a", "#b0628f", "#6f7a3a", "#8a8f98", "#2f7fbf", "#c0392b"];
const ends = lanes.flatMap((lane) => lane.spans.map(([at, took]) => at + took));
const until = Math.max(1, ...ends.slice(0, 1), ends.reduce((a, b) => Math.max(a, b), 1));
const times = { from: 0, to: until };
const LANE = 26;

function drawLanes(context, width, height) {
  const wide = width - LEFT, scale = wide / (times.to - times.from);
  context.textBaseline = "middle";
  lanes.forEach((lane, at) => {
    const top = at * LANE;
    context.fillStyle = lane.blamed ? style("--bad") : style("--soft");
    context.fillText(`rank ${lane.rank}`, 0, top + LANE / 2);
    for (const [begin, took, kind] of lane.spans) {
      const x = LEFT + (begin - times.from) * scale, long = Math.max(0.5, took * scale);
      if (x + long < LEFT || x > width) continue;
      const left = Math.max(LEFT, x), wait = kind === kinds.length - 1;
      context.fillStyle = SHADES[kind];
      context.globalAlpha = wait ? 1 : 0.45;
      context.fillRect(left, top + (wait ? 8 : 3), Math.min(width, x + long) - left, LANE - (wait ? 16 : 6));
      context.globalAlpha = 1;
    }
  });
  context.fillStyle = style("--soft");
  for (const [text, x, align] of ticks(context, wide)) {
    context.textAlign = align;
    context.fillText(text, LEFT + x, lanes.length * LANE + 10);
  }
  context.textAlign = "left";
}

/* As many times as have room side by side, both ends among them. */
function ticks(context, wide) {
  const text = (share) => `${((times.from + (times.to - times.from) * share) / 1000).toFixed(2)} ms`;
  const parts = Math.max(1, Math.min(5, Math.floor(wide / (1.5 * context.measureText(text(1)).width + 8))));
  return Array.from({ length: parts + 1 }, (_, i) => [text(i / parts), wide * i / parts, i === parts ? "right" : i ? "center" : "left"]);
}

if (!ends.length) byId("span").textContent = "No call of these steps is left in the rings.";
const [lanesElement, lanesAgain] = canvas("lanes", () => ends.length ? lanes.length * LANE + 22 : 1, ends.length ? drawLanes : () => {});
ranged(lanesElement, until, until / 5000, (event) => Math.min(1, Math.max(0, (event.offsetX - LEFT) / (lanesElement.clientWidth - LEFT))), times, lanesAgain);
lanesElement.addEventListener("pointermove", (event) => {
  const lane = lanes[Math.floor(event.offsetY / LANE)];
  if (!lane) return;
  const wide = lanesElement.clientWidth - LEFT, at = times.from + (event.offsetX - LEFT) / wide * (times.to - times.from);
  const near = (times.to - times.from) / wide * 2;
  const found = lane.spans.filter(([begin, took]) => at >= begin - near && at <= begin + took + near);
  byId("span").textContent = `rank ${lane.rank}${place(lane.rank)}: ` +
    (found.map(([, took, kind, word]) => `${kind === kinds.length - 1 ? "waits " : ""}${(took / 1000).toFixed(3)} ms ${kind === kinds.length - 1 ? "in " : ""}${words[word]}`).join("; ") || "nothing");
});
const used = new Set(lanes.flatMap((lane) => lane.spans.map((span) => span[2])));
byId("kinds").innerHTML = kinds.map((kind, i) => used.has(i) ? `<li><span class="key" style="background:${SHADES[i]}"></span>${kind}</li>` : "").join("");
