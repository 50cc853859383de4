// The page: reads the controls, and draws what explorer_arithmetic.js computes. Nothing here decides who sees whom.
"use strict";

const $ = (id) => document.getElementById(id);
const number = (x) => x.toLocaleString("en");
/** A share in percent, rounded down: 100% is all. */
function percent(share) {
  const digits = share === 1 ? 0 : share < 0.1 ? 2 : 1;
  return `${(Math.floor(share * 100 * 10 ** digits + 1e-9) / 10 ** digits).toFixed(digits)}%`;
}
const brief = (n) => (n && n % 2 ** 20 === 0 ? `${n / 2 ** 20}M` : n && n % 1024 === 0 ? `${n / 1024}K` : number(n));
const short = (n) => `${number(n)} token${n === 1 ? "" : "s"}`;

function scaled(x, units, base) {
  let unit = 0;
  while (unit < units.length - 1 && x >= base) [x, unit] = [x / base, unit + 1];
  return `${x.toLocaleString("en", { maximumSignificantDigits: 3 })} ${units[unit]}`;
}
const flopsText = (x) => scaled(x, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000);
const bytesText = (x) => scaled(x, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const secondsText = (x) => (x < 1e-6 ? "under 1 µs" : scaled(x * 1e6, ["µs", "ms", "s"], 1000));

// Memory, and the peak of dense products in bfloat16. Attention's own rate is measured on the H200 only.
const GPUS = [
  ["H200", 140, 989], ["H100 80 GB", 80, 989], ["B200", 179, 2250], ["A100 80 GB", 80, 312], ["A100 40 GB", 40, 312],
  ["L40S", 45, 362], ["RTX 5090", 32, 209], ["RTX 4090", 24, 165], ["L4", 22, 121],
];
const rateOf = (peak) => Math.round((LIBRARY.tflops * peak) / GPUS[0][2]);

const base = { layout: "interleaved", heads: 12, headDim: 64, layers: 12, causal: false, sparse: null };
const PRESETS = {
  "LongNet, 32K tokens": () => ({ ...base, tokens: 32768, branches: branchesFor(32768, 12, false) }),
  "Small: 64 tokens, two branches": () => ({
    ...base, tokens: 64, branches: [{ w: 16, r: 1 }, { w: 64, r: 4 }], heads: 4, layers: 3,
  }),
  "Causal language model, 16K": () => ({ ...base, tokens: 16384, branches: branchesFor(16384, 12, true), causal: true }),
  "One million tokens": () => ({ ...base, tokens: 2 ** 20, branches: branchesFor(2 ** 20, 16, false), heads: 16 }),
  "Block-sparse, 128K tokens": () => ({
    ...base, tokens: 131072, branches: [{ w: 8192, r: 1 }, { w: 131072, r: 12 }],
    sparse: { pattern: "dilated_sparse", ratio: 0.1, block: 64, window: null, globals: null, seed: 0 },
  }),
  "Too short: nothing crosses 8K": () => ({ ...base, tokens: 32768, branches: [{ w: 2048, r: 1 }, { w: 8192, r: 4 }] }),
};

// What is shown: the pattern, the picked row and head, the GPU, and the part of the picture from (top, left).
let pattern, row, head, gpu, tflops;
const view = { top: 0, left: 0, span: 1 };

// ---- state in the address ----

const TILES = ["pattern", "ratio", "block", "window", "globals", "seed"];

function stateText() {
  const { tokens, branches, layout, heads, headDim, layers, causal, sparse } = pattern;
  const lists = { w: branches.map(({ w }) => w), r: branches.map(({ r }) => r) };
  const words = { n: tokens, ...lists, h: heads, d: headDim, l: layers };
  if (layout !== "interleaved") words.layout = layout;
  if (causal) words.causal = 1;
  if (sparse) words.tiles = TILES.map((name) => sparse[name] ?? "");
  words.row = row;
  if (head) words.head = head;
  return "#" + Object.entries(words).map(([key, value]) => `${key}=${value}`).join("&");
}

/** Write the address once changes pause, for browsers limit how often; a frame without an address refuses. */
let keeping;
function keepAddress() {
  clearTimeout(keeping);
  keeping = setTimeout(() => {
    try {
      history.replaceState(null, "", stateText());
    } catch (error) {
      if (error.name !== "SecurityError") throw error;
    }
  }, 200);
}

function readState(text) {
  const words = new URLSearchParams(text.slice(1));
  if (!words.has("n")) return false;
  const list = (key) => (words.get(key) ?? "").split(",").map(Number), [lengths, rates] = [list("w"), list("r")];
  const read = {
    tokens: Number(words.get("n")), branches: lengths.map((w, i) => ({ w, r: rates[i] })),
    layout: LIBRARY.layouts.includes(words.get("layout")) ? words.get("layout") : "interleaved",
    heads: Number(words.get("h") ?? 12), headDim: Number(words.get("d") ?? 64), layers: Number(words.get("l") ?? 12),
    causal: words.has("causal"), sparse: null,
  };
  if (words.has("tiles")) {
    const [kind, ...numbers] = words.get("tiles").split(",");
    if (!LIBRARY.patterns.includes(kind) || kind === "content_adaptive") return false;
    read.sparse = { pattern: kind };
    TILES.slice(1).forEach((name, index) => (read.sparse[name] = numbers[index] ? Number(numbers[index]) : null));
  }
  if (problem(read)) return false;
  show(read, Number(words.get("row")) || 0, Number(words.get("head")) || 0);
  return true;
}

// ---- controls ----

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text, disabled]) => {
    const option = new Option(text, value);
    option.disabled = Boolean(disabled);
    return option;
  }));
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const COLOURS = ["s0", "s2", "s4", "s3", "s5", "s1", "s6", "s7", "s8"];
const colourName = (index) => COLOURS[index % COLOURS.length];
const swatch = (index) => element("span", { class: "swatch", style: `background: var(--${colourName(index)})` });

/** Write the pattern into the controls. */
function fillControls() {
  for (const id of ["tokens", "heads", "headDim", "layers", "layout"]) $(id).value = pattern[id];
  $("tokens-slide").value = Math.log2(pattern.tokens);
  $("causal").checked = pattern.causal;
  $("pattern").value = pattern.sparse?.pattern ?? "";
  if (pattern.sparse) {
    const { block } = pattern.sparse; // the address may have one that is not in the list
    if (![...$("block").options].some(({ value }) => Number(value) === block)) $("block").add(new Option(block, block));
    for (const id of TILES.slice(1)) $(id).value = pattern.sparse[id] ?? "";
  }
  fillBranches(pattern.branches);
}

function fillBranches(branches) {
  $("branches").replaceChildren(...branches.map(({ w, r }, index) => {
    const input = (value, name) => {
      const label = `${name} of branch ${index + 1}`;
      return element("input", { value, inputmode: "numeric", autocomplete: "off", "aria-label": label });
    };
    const remove = element("button", { type: "button", "aria-label": `Remove branch ${index + 1}` }, "×");
    remove.onclick = () => {
      fillBranches(branchesInControls().filter((_, i) => i !== index));
      update();
      $("add").focus();
    };
    return element("div", { class: "branch" }, swatch(index), input(w, "segment"), input(r, "rate"), remove);
  }));
}

/** A number as people write it: 65536, 65,536, 64K, 1M or 1e6. */
function parsed(text) {
  const [, digits, letter] = /^\s*([\d.,]+(?:e\d+)?)\s*([km]?)\s*$/i.exec(text) ?? [, "none", ""];
  return Number(digits.replaceAll(",", "")) * { "": 1, k: 1024, m: 2 ** 20 }[letter.toLowerCase()];
}
const value = (id) => parsed($(id).value);
const valueOrNull = (id) => ($(id).value.trim() ? value(id) : null);

function branchesInControls() {
  return [...$("branches").children].map((line) => {
    const [w, r] = [...line.querySelectorAll("input")].map((input) => parsed(input.value));
    return { w, r };
  });
}

function patternInControls() {
  const kind = $("pattern").value;
  const sparse = kind && {
    pattern: kind, ratio: value("ratio"), block: Number($("block").value), window: valueOrNull("window"),
    globals: valueOrNull("globals"), seed: value("seed"),
  };
  return {
    tokens: value("tokens"), branches: branchesInControls(), layout: $("layout").value, heads: value("heads"),
    headDim: value("headDim"), layers: value("layers"), causal: $("causal").checked, sparse: sparse || null,
  };
}

// ---- from controls to pictures ----

/** Show a pattern: from a preset, or from the address. */
function show(next, atRow = null, atHead = 0) {
  pattern = next;
  row = clamp(atRow ?? Math.floor(next.tokens * 0.66), 0, next.tokens - 1);
  head = clamp(atHead, 0, next.heads - 1);
  Object.assign(view, { top: 0, left: 0, span: next.tokens });
  $("preset").value = "";
  fillControls();
  refresh();
}

function startFrom(name) {
  show(PRESETS[name]());
  $("preset").value = name;
}

/** Read the controls after a change. */
function update() {
  $("preset").value = "";
  if (!pattern.sparse) { // tiles that are switched on fit the segments
    const shortest = Math.min(...branchesInControls().map(({ w }) => w));
    let block = 64;
    while (block > 1 && block > shortest) block /= 2;
    $("block").value = block;
  }
  const next = patternInControls();
  $("tiles").hidden = !$("pattern").value;
  $("seed-field").hidden = $("pattern").value !== "random";
  if (problem(next)) return warn();
  const all = view.span === pattern.tokens;
  const unlike = next.tokens !== pattern.tokens;
  pattern = next;
  row = clamp(row, 0, pattern.tokens - 1);
  head = clamp(head, 0, pattern.heads - 1);
  if (all || view.span > pattern.tokens) view.span = pattern.tokens;
  if (unlike) $("tokens-slide").value = Math.log2(pattern.tokens);
  moveTo(view.top, view.left);
  refresh();
}

function note(lines, kind = "warning") {
  $("notes").replaceChildren(...lines.map((text) => element("li", { class: kind }, text)));
}

/** Work in slices, so that the page stays responsive; a newer task of the same name takes the place of an older one. */
const tasks = {};
function run(name, generator, done) {
  const mine = (tasks[name] = {});
  (function slice() {
    if (tasks[name] !== mine) return;
    for (const until = performance.now() + 12; performance.now() < until; ) {
      const { value, done: finished } = generator.next();
      if (finished) return done?.(value);
    }
    setTimeout(slice);
  })();
}

let counts, reach;

/** The pattern has changed: draw everything again. */
function refresh() {
  $("tiles").hidden = !pattern.sparse;
  $("seed-field").hidden = pattern.sparse?.pattern !== "random";
  options($("head"), Array.from({ length: pattern.heads }, (_, h) => [h, `${h} of ${pattern.heads}`]));
  $("legend").replaceChildren(...pattern.branches.map(({ w, r }, index) =>
    element("li", {}, swatch(index), `segments of ${number(w)}, every ${r === 1 ? "" : `${ordinal(r)} `}token`)));
  counts = reach = null;
  warn();
  figures();
  costs();
  run("counts", countPairs(pattern), (found) => {
    counts = found;
    warn();
    figures();
    costs();
    run("reach", reachShares(pattern, LIBRARY.reachWork), (shares) => {
      reach = shares;
      warn();
      figures();
      reachNumbers();
    });
  });
  $("python").textContent = pythonFor(pattern);
  pick(row, head);
  drawMatrix();
}

const ordinal = (n) => `${n}${n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th"}`;

/** Why the controls are refused; else, what to know about the pattern. */
function warn() {
  const rate = value("tflops");
  const wrong = problem(patternInControls()) ?? (rate > 0 && rate < Infinity ? null : "TFLOP/s must be a number above 0.");
  if (wrong) return note([wrong], "error");
  const lines = [], { tokens, heads, layout, layers, branches } = pattern;
  const found = Object.fromEntries(reachWarnings(pattern).map((one) => [one.reason, one]));
  if (found.tokens) {
    const { longest } = found.tokens, nested = branches.every(({ w }) => longest % w === 0);
    const limit = nested ? "Nothing crosses a border of the longest segments, at any depth" : "No row sees farther";
    lines.push(
      `The longest segment has ${number(longest)} of ${short(tokens)}. ${limit}. “Connect all” chooses branches that ` +
        "relate every token.",
    );
  }
  if (found.heads) {
    const { read, r, w } = found.heads;
    lines.push(
      `${heads} head${heads > 1 ? "s" : ""} in the layout ${layout} read ${read} of the ${r} grids of segments of ` +
        `${number(w)}. Tokens on the other grids do not see that far.`,
    );
  }
  if (counts && counts.covered < 1) {
    const grouped = layout === "grouped" ? "In the layout grouped, each head reads one branch only." : "";
    lines.push(
      `${percent(1 - counts.covered)} of all (row, head) pairs are blind: no branch covers them, and their output is 0. ` +
        (found.rows ? "Add a branch with rate 1." : grouped),
    );
  }
  const last = reach?.at(-1);
  if (last && last.least < 1 && !found.tokens && !found.heads) {
    const gap =
      " Under causality, the first rows after a border of the shortest segments miss the last tokens before it; " +
      "“Connect all” chooses branches without this gap.";
    lines.push(
      `After ${layersText()} some rows depend on ${percent(last.least)} of the tokens only.` +
        (pattern.causal && !pattern.sparse && layers > 2 ? gap : ""),
    );
  }
  if (counts && counts.densePairs < 1.5 * counts.pairs) {
    const share = (counts.pairs / counts.densePairs).toLocaleString("en", { maximumSignificantDigits: 3 });
    lines.push(`This pattern computes ${share} times the pairs of dense attention: use dense attention instead.`);
  }
  note(lines);
}

const layersText = () => `${pattern.layers} layer${pattern.layers > 1 ? "s" : ""}`;

function figures() {
  const wait = "…", factor = counts && counts.densePairs / counts.pairs;
  const entry = (name, shown, more) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, shown, element("small", {}, more)));
  const work = counts && (counts.pairs ? `1/${factor.toLocaleString("en", { maximumSignificantDigits: 3 })}` : "none");
  const keys = counts && counts.mean.toLocaleString("en", { maximumFractionDigits: counts.mean < 100 ? 1 : 0 });
  $("figures").replaceChildren(
    entry("Work", work ?? wait, "of dense attention's FLOPs"),
    entry("Keys per row", keys ?? wait, counts ? `${number(counts.least)} to ${number(counts.most)}` : wait),
    entry("Coverage", counts ? percent(counts.covered) : wait, "of rows and heads see something"),
    entry("Reach", reach ? percent(reach.at(-1).mean) : wait, `of tokens influence a row after ${layersText()}`),
  );
}

function fillTable(table, names, rows) {
  const head = element("tr", {}, ...names.map((text) => element("th", { scope: "col" }, text)));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function costs() {
  const [name, gib] = GPUS[gpu];
  const costOf = (pairs) => cost(pattern, pairs, tflops, LIBRARY.backwardWork);
  const [mine, dense] = counts ? [costOf(counts.pairs), costOf(counts.densePairs)] : [];
  const line = (what, text) => [what, ...[mine, dense].map((x) => (x ? text(x) : "…"))];
  const lines = [
    line("Forward, one layer", ({ flops }) => flopsText(flops)),
    line("Time, forward, one layer", ({ forward }) => secondsText(forward)),
    line("Time, training step, all layers", ({ step }) => secondsText(step)),
    line("Memory, training, all layers", ({ bytes }) => bytesText(bytes)),
  ];
  const names = ["Attention alone", "This pattern", "Dense"];
  fillTable($("cost"), names, lines.map((line) => element("tr", {}, ...line.map((text) => element("td", {}, text)))));
  const fits = mine && mine.bytes <= gib * 2 ** 30;
  const scores = 2 * pattern.heads * pattern.tokens ** 2;
  $("cost-note").textContent = mine
    ? `${bytesText(mine.bytes)} ${fits ? "fits" : "does not fit"} into the ${gib} GiB of one ${name}` +
      `${fits ? "" : ": share the sequence between GPUs"}. ` +
      `It is queries, keys, values, results and gradients in bfloat16, for a batch of 1, ` +
      `without projections and feed-forward layers. Dense attention needs the same in a fused kernel, and ` +
      `${bytesText(scores)} more per layer if it writes out its scores. Times are modelled at ${number(tflops)} TFLOP/s: ` +
      `the package reaches ${LIBRARY.tflops} on an H200, and the other GPUs are scaled from it by their peak rates.`
    : "";
  showCommands();
}

/** Commands may wrap between words, not within a flag. */
function showCommands() {
  const words = (line) => line.split(" ").flatMap((word) => [element("span", {}, word), " "]);
  const lines = commandsFor(pattern, head, GPUS[gpu][1], tflops).flatMap((line) => [...words(line).slice(0, -1), "\n"]);
  $("commands").replaceChildren(...lines.slice(0, -1));
}

// ---- pictures ----

function colours() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => {
    const hex = style.getPropertyValue(`--${name}`).trim().slice(1);
    return (hex.length === 3 ? [...hex].map((x) => x + x) : hex.match(/../g)).map((x) => parseInt(x, 16));
  };
  return { back: rgb("back"), ink: rgb("ink"), branches: pattern.branches.map((_, index) => rgb(colourName(index))) };
}

/** One line of cells as pixels: the colour of the branch that shows most (the last of equals), darker for a larger
 * share. */
function paint(image, y, shares, { back, branches }) {
  const width = image.width;
  for (let x = 0; x < width; x++) {
    let total = 0, best = 0, most = 0;
    for (let index = 0; index < shares.length; index++) {
      const share = shares[index][x];
      total += share;
      if (share && share >= most) [most, best] = [share, index];
    }
    // Even a small share is visible: a dilated branch covers few pairs of a cell.
    const ink = total > 0 ? Math.min(1, 0.2 + 0.8 * Math.sqrt(total)) : 0, colour = branches[best];
    for (let c = 0; c < 3; c++) image.data[4 * (y * width + x) + c] = back[c] + (colour[c] - back[c]) * ink;
    image.data[4 * (y * width + x) + 3] = 255;
  }
}

/** The share of each cell that each branch shows to rows [i0, i1). */
function cellShares(offsets, i0, i1, edges, most) {
  return offsets.map((offset, index) => {
    const shares = new Float64Array(edges.length - 1);
    const { w } = pattern.branches[index], first = Math.floor(i0 / w) * w, end = (Math.floor((i1 - 1) / w) + 1) * w;
    for (let x = 0; x < shares.length; x++) {
      if (edges[x + 1] <= first || edges[x] >= end) continue;
      const pairs = cellPairs(pattern, index, offset, i0, i1, edges[x], edges[x + 1], most);
      shares[x] = pairs / ((i1 - i0) * (edges[x + 1] - edges[x]));
    }
    return shares;
  });
}

const edgesOf = (from, span, cells) => Array.from({ length: cells + 1 }, (_, c) => from + cellStart(c, cells, span));
const MOST_CELLS = 512;

/** How many cells a canvas shows: one per token, as far as there are pixels for them. */
const cellsOf = (canvas, tokens) =>
  Math.min(tokens, MOST_CELLS, Math.max(64, Math.floor(canvas.clientWidth * devicePixelRatio)));

let drawn = null, drawnPixels = 0; // the cells of the matrix, without the mark of the row
const matrixPixels = () => $("matrix").clientWidth * devicePixelRatio;

function* matrixLines() {
  const cells = cellsOf($("matrix"), view.span), palette = colours();
  const offsets = offsetTable(pattern).map((each) => each[head]);
  const rows = edgesOf(view.top, view.span, cells), columns = edgesOf(view.left, view.span, cells);
  const image = new ImageData(cells, cells);
  drawn = { image, rows };
  // Every eighth line first, so that the whole picture is there at once.
  for (const stride of [8, 4, 2, 1]) {
    for (let y = 0; y < cells; y += stride) {
      if (stride < 8 && y % (2 * stride) === 0) continue;
      const shares = cellShares(offsets, rows[y], rows[y + 1], columns, 2);
      for (let copy = y; copy < Math.min(y + stride, cells); copy++) paint(image, copy, shares, palette);
      yield;
    }
    putMatrix();
  }
}

function drawMatrix() {
  ticks($("ticks-left"), view.top, "top"); // whose width leaves the rest to the picture
  ticks($("ticks-below"), view.left, "left");
  drawnPixels = matrixPixels();
  run("matrix", matrixLines());
  const range = (start) => `${number(start)} to ${number(start + view.span - 1)}`;
  const label = `Which keys rows ${range(view.top)} see, of keys ${range(view.left)}, in head ${head}`;
  $("matrix").setAttribute("aria-label", label);
}

function putMatrix() {
  if (!drawn) return;
  const canvas = $("matrix"), { image, rows } = drawn, cells = image.width;
  const sharp = Math.ceil((canvas.clientWidth * devicePixelRatio) / cells); // whole pixels per cell
  canvas.width = canvas.height = cells * sharp;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  const small = new OffscreenCanvas(cells, cells);
  small.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  const { ink, back } = colours();
  if (sharp >= 6) {
    context.fillStyle = `rgb(${back})`;
    for (let x = 1; x < cells; x++) {
      context.fillRect(x * sharp, 0, 1, canvas.height);
      context.fillRect(0, x * sharp, canvas.width, 1);
    }
  }
  const y = rows.findIndex((edge) => edge > row) - 1;
  if (row >= view.top && y >= 0) {
    context.strokeStyle = `rgb(${ink})`;
    context.lineWidth = Math.max(1.5, devicePixelRatio * 1.5);
    const height = Math.max(sharp, 4 * devicePixelRatio);
    context.strokeRect(1, y * sharp + (sharp - height) / 2, canvas.width - 2, height);
  }
}

function ticks(place, from, side) {
  const text = (share) => brief(from + Math.round(share * view.span));
  const put = (marks) =>
    place.replaceChildren(...marks.map((share) => element("span", { style: `${side}: ${100 * share}%` }, text(share))));
  put(view.span < 5 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1]);
  const labels = [...place.children];
  if (side === "top") place.style.width = `${Math.max(...labels.map(({ textContent }) => textContent.length)) + 1}ch`;
  else {
    const boxes = labels.map((label) => label.getBoundingClientRect());
    if (boxes.some(({ left }, index) => index && left < boxes[index - 1].right + 4)) put([0, 0.5, 1]);
  }
}

// ---- the picked row ----

function pick(nextRow, nextHead = head) {
  const another = nextHead !== head;
  row = clamp(Math.round(nextRow), 0, pattern.tokens - 1);
  head = clamp(nextHead, 0, pattern.heads - 1);
  $("row").value = row;
  $("head").value = head;
  keepAddress();
  const seen = rowView(pattern, head, row), total = seen.reduce((sum, { keys }) => sum + keys, 0);
  const lines = seen.map(({ start, end, onGrid, keys }, index) => {
    const { w, r } = pattern.branches[index], name = element("td", {}, swatch(index), ` ${number(w)}, rate\u00a0${r}`);
    const cells = [`${number(start)} – ${number(end - 1)}`, onGrid ? "yes" : "no", number(keys)];
    return element("tr", {}, name, ...cells.map((text) => element("td", {}, text)));
  });
  fillTable($("row-table"), ["Branch", "Its segment", "On the grid", "Keys seen"], lines);
  $("readout").textContent = total
    ? `Row ${number(row)}, head ${head}, sees ${number(total)} of ${number(pattern.tokens)} keys` +
      `${pattern.branches.length > 1 ? ", counted once per branch" : ""}.`
    : `Row ${number(row)} is blind in head ${head}: no branch covers it, and its output is 0.`;
  $("row-strip").setAttribute("aria-label", $("readout").textContent);
  drawRow();
  run("row reach", reachOfRow(pattern, row), drawReach);
  if (another) drawMatrix();
  else putMatrix();
  showCommands();
}

function strip(canvas, cells, shares, palette) {
  canvas.width = cells;
  canvas.height = 1;
  const image = new ImageData(cells, 1);
  paint(image, 0, shares, palette);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const scale = () => {
  const { tokens } = pattern;
  return [0, Math.round(tokens / 2), tokens].map((at) => element("span", {}, brief(at)));
};

function drawRow() {
  const cells = cellsOf($("row-strip"), pattern.tokens), offsets = offsetTable(pattern).map((each) => each[head]);
  strip($("row-strip"), cells, cellShares(offsets, row, row + 1, edgesOf(0, pattern.tokens, cells), 2), colours());
  $("row-scale").replaceChildren(...scale());
}

let depthsShown = 0;

function drawReach(reached) {
  const { tokens, layers } = pattern, cells = Math.min(cellsOf($("row-strip"), tokens), 400);
  const edges = edgesOf(0, tokens, cells), palette = colours();
  // The strip of the last layer that adds something stands for all later layers.
  const settled = reached.length < layers || reached.at(-1).share === reached.at(-2)?.share;
  const shown = Math.max(1, settled ? reached.length - 1 : reached.length);
  depthsShown = shown;
  $("reach").replaceChildren(...reached.slice(0, shown).map(({ seen, share }, index) => {
    const label = `Tokens that influence row ${row} after ${index + 1} layers: ${percent(share)}`;
    const canvas = element("canvas", { class: "strip", role: "img", "aria-label": label });
    const shares = new Float64Array(cells);
    for (let x = 0; x < cells; x++) {
      let count = 0;
      for (let at = edges[x]; at < edges[x + 1]; at++) count += seen[at];
      shares[x] = count / (edges[x + 1] - edges[x]);
    }
    strip(canvas, cells, [shares], palette);
    const upTo = index + 1 === shown && shown < layers ? `–${layers}` : "";
    const figures = [percent(share), "…", "…"].map((text) => element("span", {}, text));
    const name = element("span", {}, `${index + 1}${upTo}`);
    return element("div", { class: "layer" }, name, canvas, element("span", { class: "shares" }, ...figures));
  }));
  const tooMany = " The block pattern has too many tiles to follow here: this is the reach of the branches alone.";
  const follows = followsTiles(pattern) ? "" : tooMany;
  const which = pattern.causal ? "of the tokens up to a row's own" : `of ${number(tokens)} tokens`;
  const done = shown < layers ? ` More than ${shown} layer${shown > 1 ? "s" : ""} add nothing.` : "";
  const rows = spreadRows(tokens, LIBRARY.reachWork).length;
  const sample = rows < tokens
    ? ` The mean is over ${number(rows)} evenly spread rows; the least is over them and rows with which segments begin.`
    : "";
  $("reach-note").textContent =
    `The tokens that row ${number(row)} depends on after each layer, through all heads; shares are ${which}.` +
    done + sample + follows;
  reachNumbers();
}

/** Means and minima over rows, once they are counted. */
function reachNumbers() {
  [...$("reach").children].forEach((line, index) => {
    const [, mean, least] = line.lastChild.children;
    const depth = reach?.[index === depthsShown - 1 ? reach.length - 1 : index];
    mean.textContent = depth ? percent(depth.mean) : "…";
    least.textContent = depth ? percent(depth.least) : "…";
  });
}

// ---- zoom and move ----

function moveTo(top, left) {
  view.top = clamp(Math.round(top), 0, pattern.tokens - view.span);
  view.left = clamp(Math.round(left), 0, pattern.tokens - view.span);
}

/** Zoom by a factor; the point at shares (x, y) of the picture stays in place. */
function zoom(factor, x = 0.5, y = 0.5) {
  const span = clamp(Math.round(view.span / factor), Math.min(64, pattern.tokens), pattern.tokens);
  const [top, left] = [view.top + y * (view.span - span), view.left + x * (view.span - span)];
  view.span = span;
  moveTo(top, left);
  drawMatrix();
}

/** Show `span` tokens around the picked row and its own key. */
function around(span) {
  view.span = clamp(span, 1, pattern.tokens);
  moveTo(row - view.span / 2, row - view.span / 2);
  drawMatrix();
}

function zoomAtRow(factor) {
  const y = (row - view.top) / view.span, x = (row - view.left) / view.span;
  if (y >= 0 && y <= 1 && x >= 0 && x <= 1) zoom(factor, x, y);
  else zoom(factor);
}

function showRow() {
  if (row >= view.top && row < view.top + view.span) return;
  moveTo(row - view.span / 2, view.left + (row - view.span / 2 - view.top));
  drawMatrix();
}

function listenToMatrix() {
  const canvas = $("matrix"), pointers = new Map();
  const share = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    return at.map((x) => clamp(x, 0, 0.999999));
  };
  let moved = 0;
  canvas.onpointerdown = (event) => {
    pointers.set(event.pointerId, share(event));
    canvas.setPointerCapture(event.pointerId);
    moved = 0;
  };
  canvas.onpointermove = (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = [...pointers.values()], [x, y] = share(event), [oldX, oldY] = pointers.get(event.pointerId);
    pointers.set(event.pointerId, [x, y]);
    moved += Math.hypot(x - oldX, y - oldY);
    if (moved < 0.01) return;
    const after = [...pointers.values()];
    if (after.length === 2) {
      const distance = ([a, b]) => Math.hypot(a[0] - b[0], a[1] - b[1]) || 1e-3;
      zoom(distance(after) / distance(before), (after[0][0] + after[1][0]) / 2, (after[0][1] + after[1][1]) / 2);
    }
    moveTo(view.top - ((y - oldY) * view.span) / after.length, view.left - ((x - oldX) * view.span) / after.length);
    drawMatrix();
  };
  canvas.onpointerup = canvas.onpointercancel = (event) => {
    const [, y] = share(event);
    if (event.type === "pointerup" && moved < 0.01 && pointers.size === 1) pick(Math.floor(view.top + y * view.span));
    pointers.delete(event.pointerId);
  };
  canvas.addEventListener("wheel", (event) => {
    if (view.span === pattern.tokens && event.deltaY > 0 && !event.ctrlKey) return; // nothing to zoom: the page scrolls
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 400), ...share(event));
  }, { passive: false });
  canvas.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = Math.max(1, Math.round(view.span / MOST_CELLS)) * (event.shiftKey ? 16 : 1);
    const actions = {
      ArrowUp: () => pick(row - step), ArrowDown: () => pick(row + step),
      Home: () => pick(0), End: () => pick(pattern.tokens - 1),
      PageUp: () => pick(row - view.span / 4), PageDown: () => pick(row + view.span / 4),
      ArrowLeft: () => (moveTo(view.top, view.left - view.span / 8), drawMatrix()),
      ArrowRight: () => (moveTo(view.top, view.left + view.span / 8), drawMatrix()),
      "+": () => zoomAtRow(2), "=": () => zoomAtRow(2), "-": () => zoomAtRow(0.5), 0: () => zoom(0),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
    if (!["ArrowLeft", "ArrowRight", "+", "=", "-", "0"].includes(event.key)) showRow();
  };
}

// ---- begin ----

function begin() {
  options($("preset"), [["", "Your own", true], ...Object.keys(PRESETS).map((name) => [name, name])]);
  options($("layout"), LIBRARY.layouts.map((name) => [name, name]));
  const byContent = (name) => name === "content_adaptive"; // needs queries and keys
  const label = (name) => name + (byContent(name) ? ": see ./run show" : "");
  const kinds = LIBRARY.patterns.map((name) => [name, label(name), byContent(name)]);
  options($("pattern"), [["", "none: every tile"], ...kinds]);
  options($("block"), [1, 2, 4, 8, 16, 32, 64, 128, 256].map((size) => [size, size]));
  options($("gpu"), GPUS.map(([name, gib], index) => [index, `${name}, ${gib} GiB`]));
  $("ratio").value = 0.1;
  $("block").value = 64;
  $("seed").value = 0;
  [gpu, tflops] = [0, LIBRARY.tflops];
  $("tflops").value = tflops;

  let waiting;
  document.querySelector(".controls").addEventListener("input", (event) => {
    if (["preset", "gpu", "tflops", "tokens-slide"].includes(event.target.id)) return;
    clearTimeout(waiting);
    waiting = setTimeout(update, 120);
  });
  $("preset").onchange = () => startFrom($("preset").value);
  $("tokens-slide").oninput = () => {
    $("tokens").value = 2 ** $("tokens-slide").value;
    update();
  };
  $("add").onclick = () => {
    const branches = branchesInControls(), last = branches.at(-1) ?? { w: 512, r: 0.5 };
    fillBranches([...branches, { w: 2 * last.w, r: 2 * last.r }]);
    update();
    $("branches").lastChild.querySelector("input").focus();
  };
  $("connect").onclick = () => {
    const { tokens, heads, causal } = patternInControls();
    // The first segments are the package's 2,048 tokens, or shorter so that short sequences are dilated too.
    const shortest = Math.min(2048, 2 ** Math.max(0, Math.floor(Math.log2(tokens / 4))));
    if (![tokens, heads].every((x) => Number.isInteger(x) && x > 0)) return;
    fillBranches(branchesFor(tokens, heads, causal, shortest));
    if ($("layout").value === "grouped") $("layout").value = "interleaved";
    update();
  };
  $("gpu").onchange = () => {
    gpu = Number($("gpu").value);
    $("tflops").value = tflops = rateOf(GPUS[gpu][2]);
    warn();
    costs();
  };
  $("tflops").oninput = () => {
    warn();
    const rate = value("tflops");
    if (rate > 0 && rate < Infinity) tflops = rate;
    costs();
  };
  $("row").onchange = () => {
    const next = value("row");
    pick(Number.isFinite(next) ? next : row);
    showRow();
  };
  $("row").onkeydown = (event) => {
    const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pick(row + step);
    showRow();
  };
  $("head").onchange = () => pick(row, Number($("head").value));
  $("in").onclick = () => zoomAtRow(2);
  $("out").onclick = () => zoomAtRow(0.5);
  $("fit").onclick = () => around(pattern.tokens);
  $("near").onclick = () => around(64);
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.onclick = async () => {
      const code = $(button.dataset.copy);
      const copied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
      if (!copied) getSelection().selectAllChildren(code); // a page that came over HTTP has no clipboard
      button.textContent = copied ? "Copied" : "Selected";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    };
  }
  listenToMatrix();
  const redraw = () => (drawMatrix(), pick(row));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // On a telephone, scrolling changes the height of the window alone. Zooming may change only the ratio of pixels.
  addEventListener("resize", () => drawnPixels === matrixPixels() || redraw());
  addEventListener("hashchange", () => readState(location.hash));
  if (!readState(location.hash)) startFrom(Object.keys(PRESETS)[0]);
}

begin();
