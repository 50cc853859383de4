// The arithmetic of a pattern: who sees whom, what that costs, and how far it reaches. It draws nothing.
//
// A pattern is { tokens, branches: [{ w, r }], layout, heads, headDim, layers, causal, sparse }. `sparse` is null, or
// { pattern, ratio, block, window, globals, seed } with null for a default. The names, the rules and the results are
// those of the Python package (core/spec.py, pattern.py, block_pattern.py, reach.py, parallel/plan.py).
// Generators yield between pieces of work, so that a page can draw meanwhile; `finish` runs one to its end.
"use strict";

const ceilDiv = (a, b) => Math.ceil(a / b);
const clamp = (x, least, most) => Math.min(Math.max(x, least), most);

function finish(generator) {
  for (;;) {
    const { value, done } = generator.next();
    if (done) return value;
  }
}

// ---- grids ----

/** offset[branch][head], null where the head is absent from the branch. */
function offsetTable({ branches, layout, heads }) {
  const all = Array.from({ length: heads }, (_, head) => head);
  if (layout === "interleaved") return branches.map(({ r }) => all.map((h) => h % r));
  if (layout === "blocked") return branches.map(({ r }) => all.map((h) => Math.floor(h / ceilDiv(heads, r))));
  const small = Math.floor(heads / branches.length), larger = heads % branches.length;
  const first = (g) => g * small + Math.min(g, larger);
  return branches.map(({ r }, g) => all.map((h) => (first(g) <= h && h < first(g + 1) ? g % r : null)));
}

/** How many rows of a segment are on the grid. */
const gridRows = (length, r, offset) => Math.max(0, ceilDiv(length - offset, r));

/** The segments that have rows on a grid: start, grid rows, first position on the grid. */
function* grids({ tokens }, { w, r }, offset) {
  if (offset === null) return;
  for (let start = 0; start < tokens; start += w) {
    const rows = gridRows(Math.min(w, tokens - start), r, offset);
    if (rows) yield { start, rows, first: start + offset };
  }
}

/** Heads with the same offsets in every branch see the same: [{ offsets, head, heads }]. */
function headGroups(pattern) {
  const table = offsetTable(pattern), groups = new Map();
  for (let head = 0; head < pattern.heads; head++) {
    const offsets = table.map((row) => row[head]), key = offsets.join();
    if (groups.has(key)) groups.get(key).heads++;
    else groups.set(key, { offsets, head, heads: 1 });
  }
  return [...groups.values()];
}

// ---- block patterns ----

const WINDOWED = ["local_window", "global_local"];
const CLASS = 2 ** 51; // between classes of preference; the order within a class stays below it for 2^20 tiles

/** The tiles that a row of tiles prefers beyond its own: how many global ones, and how far its window extends. */
function preferred({ pattern, block, window, globals }) {
  const always = pattern === "global_local" ? block : 0;
  return { first: ceilDiv(globals ?? always, block), reach: window === null ? -1 : ceilDiv(window, 2 * block) };
}

/** How many tiles row i of a grid of `tiles` tiles keeps. */
function keptCount(sparse, tiles, i, causal) {
  const visible = causal ? i + 1 : tiles;
  const budget = Math.min(Math.max(Math.floor(sparse.ratio * visible + 0.5), 1), visible);
  if (!WINDOWED.includes(sparse.pattern) || sparse.window === null) return budget;
  const { first, reach } = preferred(sparse);
  const from = Math.max(0, i - reach), to = Math.min(visible - 1, i + reach);
  const globals = Math.min(first, from) + Math.max(0, Math.min(first, visible) - Math.max(to + 1, from));
  return Math.min(budget, to - from + 1 + globals);
}

/** The key tiles, ascending, that row i of a grid of `tiles` tiles keeps. */
function chooseTiles(sparse, branch, tiles, i, causal) {
  const { first, reach } = preferred(sparse), windowed = WINDOWED.includes(sparse.pattern) && reach >= 0;
  const visible = causal ? i + 1 : tiles, stride = 2 * tiles + 2;
  const draws = sparse.pattern === "random" ? randomNumbers(mixed([sparse.seed, branch, i]), visible) : null;
  const order = new Float64Array(visible);
  for (let j = 0; j < visible; j++) {
    const distance = Math.abs(i - j);
    const rank = distance === 0 ? 0 : j < first ? 1 : distance <= reach ? 2 : windowed ? 4 : 3;
    const within = rank === 3 ? preference(sparse, tiles, j, distance, draws) : 0;
    order[j] = rank === 4 ? Infinity : rank * CLASS + within * stride + 2 * distance + (j > i ? 1 : 0);
  }
  const kept = order.sort().subarray(0, keptCount(sparse, tiles, i, causal));
  return Int32Array.from(kept, (key) => {
    const side = (key % CLASS) % stride;
    return side % 2 ? i + (side - 1) / 2 : i - side / 2;
  }).sort();
}

/** What the pattern orders key tiles by, lowest first. */
function preference({ pattern, ratio }, tiles, j, distance, draws) {
  if (pattern === "dilated_sparse") return distance / (distance & -distance); // the odd part
  if (pattern === "strided") {
    const tooth = Math.floor(distance * ratio);
    return Math.floor(tooth / ratio) === distance || Math.floor((tooth + 1) / ratio) === distance ? 0 : 1;
  }
  if (pattern === "random") return draws[j];
  if (pattern === "hierarchical") return Math.floor(distance / (j ? j & -j : 2 ** (32 - Math.clz32(tiles))));
  return 0;
}

/** One 63-bit seed from several numbers (a Weyl sequence through the finaliser of splitmix64). */
function mixed(words) {
  const bits = (x) => BigInt.asUintN(64, x);
  let state = 0n;
  for (const word of words) {
    state = bits(state + BigInt(word) + 0x9e3779b97f4a7c15n);
    state = bits((state ^ (state >> 30n)) * 0xbf58476d1ce4e5b9n);
    state = bits((state ^ (state >> 27n)) * 0x94d049bb133111ebn);
    state ^= state >> 31n;
  }
  return state >> 1n;
}

/** `count` numbers below 2^30 as torch.randint draws them: a Mersenne Twister with the seed's low 32 bits, two of whose
 * numbers make one of 64 bits, the low half last. */
function randomNumbers(seed, count) {
  const state = new Uint32Array(624), numbers = new Uint32Array(count);
  state[0] = Number(seed & 0xffffffffn);
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  for (let n = 0; n < 2 * count; n++) {
    const at = n % 624;
    if (at === 0) {
      for (let i = 0; i < 624; i++) {
        const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
        state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
      }
    }
    let y = state[at];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    if (n % 2) numbers[(n - 1) / 2] = (y ^ (y >>> 18)) & 0x3fffffff;
  }
  return numbers;
}

const tilesSeen = new WeakMap(); // pattern -> its chosen tiles, by branch, number of tiles and row

function keptTiles(pattern, branch, tiles, i) {
  if (!tilesSeen.has(pattern)) tilesSeen.set(pattern, new Map());
  const known = tilesSeen.get(pattern), key = (branch * 2 ** 20 + tiles) * 2 ** 20 + i; // below 2^53 for 2^13 branches
  if (!known.has(key)) known.set(key, chooseTiles(pattern.sparse, branch, tiles, i, pattern.causal));
  return known.get(key);
}

/** The index of the first of some ascending numbers that is at least x. */
function lowerBound(ascending, x) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ---- who sees whom ----

/** Pairs (i, j) with j <= i, where i is in [a, b) and j in [c, d). */
function trianglePairs(a, b, c, d) {
  const from = Math.max(a, c), to = Math.max(from, Math.min(b, d));
  const slope = ((to - from) * (from + to + 1 - 2 * c)) / 2;
  return (d > c ? slope : 0) + Math.max(0, b - Math.max(a, d)) * Math.max(0, d - c);
}

/** Pairs of grid rows [a, b) and keys [c, d) of a grid of `rows` rows. With `most`, only that many rows of tiles are
 * looked at, evenly spread, and stand for the others. */
function gridPairs(pattern, branch, rows, [a, b], [c, d], most = Infinity) {
  if (a >= b || c >= d) return 0;
  const { sparse, causal } = pattern;
  if (!sparse) return causal ? trianglePairs(a, b, c, d) : (b - a) * (d - c);
  const { block } = sparse, tiles = ceilDiv(rows, block);
  const top = Math.floor(a / block), count = Math.floor((b - 1) / block) - top + 1, looked = Math.min(count, most);
  let pairs = 0;
  for (let n = 0; n < looked; n++) {
    const i = top + Math.floor(((n + 0.5) * count) / looked);
    const own = [i * block, Math.min((i + 1) * block, rows)], from = Math.max(a, own[0]), to = Math.min(b, own[1]);
    const kept = keptTiles(pattern, branch, tiles, i);
    const left = Math.floor(c / block), right = Math.floor((d - 1) / block);
    const low = lowerBound(kept, left), high = lowerBound(kept, right + 1);
    if (low >= high) continue;
    let keys = (high - low) * block;
    if (kept[low] === left) keys -= c - left * block;
    if (kept[high - 1] === right) keys -= (right + 1) * block - d;
    const ownKeys = [Math.max(c, own[0]), Math.min(d, own[1])];
    if (causal && ownKeys[0] < ownKeys[1]) {
      pairs += (to - from) * (keys - (ownKeys[1] - ownKeys[0])) + trianglePairs(from, to, ...ownKeys);
    } else pairs += (to - from) * keys;
  }
  return (pairs * count) / looked;
}

/** Pairs that one branch shows to queries [i0, i1) and keys [j0, j1), for a head with this offset. */
function cellPairs(pattern, index, offset, i0, i1, j0, j1, most = Infinity) {
  if (offset === null || (pattern.causal && j0 >= i1)) return 0;
  const { w, r } = pattern.branches[index];
  const first = Math.floor(Math.max(i0, j0) / w), last = Math.floor((Math.min(i1, j1) - 1) / w);
  let pairs = 0;
  for (let s = first; s <= last; s++) {
    const start = s * w, rows = gridRows(Math.min(w, pattern.tokens - start), r, offset);
    const row = (position) => clamp(Math.ceil((position - start - offset) / r), 0, rows);
    const inside = gridPairs(pattern, index, rows, [row(i0), row(i1)], [row(j0), row(j1)], most);
    // Segments between the first and the last lie within both intervals, and are alike.
    const alike = s > first && s < last ? last - first - 1 : 1;
    pairs += inside * alike;
    s += alike - 1;
  }
  return pairs;
}

/** The first position of cell number c, where `cells` cells share `tokens` positions. */
const cellStart = (c, cells, tokens) => Math.ceil((c * tokens) / cells);

/** For each of cells x cells parts of all (query, key) pairs, the share that a head sees, once per branch. */
function density(pattern, head, cells) {
  const offsets = offsetTable(pattern).map((row) => row[head]), edge = (c) => cellStart(c, cells, pattern.tokens);
  return Array.from({ length: cells }, (_, y) =>
    Array.from({ length: cells }, (_, x) => {
      const cell = [edge(y), edge(y + 1), edge(x), edge(x + 1)];
      const pairs = offsets.reduce((sum, offset, index) => sum + cellPairs(pattern, index, offset, ...cell), 0);
      return pairs / ((cell[1] - cell[0]) * (cell[3] - cell[2]));
    }),
  );
}

/** What a row sees in each branch: its segment, whether it is on the grid, and how many keys. */
function rowView(pattern, head, row) {
  return offsetTable(pattern).map((offsets, index) => {
    const { w, r } = pattern.branches[index], offset = offsets[head], start = row - (row % w);
    const keys = cellPairs(pattern, index, offset, row, row + 1, 0, pattern.tokens);
    return { start, end: Math.min(start + w, pattern.tokens), onGrid: offset === (row % w) % r, keys };
  });
}

// ---- counts over all rows and heads ----

/** How many keys each row of a grid sees. */
function* keysPerRow(pattern, branch, rows) {
  const { sparse, causal } = pattern, seen = new Int32Array(rows);
  if (!sparse) return causal ? seen.map((_, i) => i + 1) : seen.fill(rows);
  const { block } = sparse, tiles = ceilDiv(rows, block), missing = tiles * block - rows;
  for (let i = 0; i < tiles; i++) {
    if (i % 64 === 63) yield;
    const count = keptCount(sparse, tiles, i, causal), end = Math.min((i + 1) * block, rows);
    if (causal) {
      for (let row = i * block; row < end; row++) seen[row] = (count - 1) * block + (row % block) + 1;
    } else {
      const short = missing && keptTiles(pattern, branch, tiles, i).at(-1) === tiles - 1; // keeps the last tile
      seen.fill(count * block - (short ? missing : 0), i * block, end);
    }
  }
  return seen;
}

/** Exact counts: pairs seen, pairs of the branches without a block pattern, dense pairs, coverage, keys per row. */
function* countPairs(pattern) {
  const { tokens, heads, causal, branches } = pattern;
  const seen = new Int32Array(tokens), known = new Map();
  const counts = { pairs: 0, branchPairs: 0, least: Infinity, most: 0, covered: 0 };
  for (const group of headGroups(pattern)) {
    seen.fill(0);
    for (const [index, branch] of branches.entries()) {
      for (const { rows, first } of grids(pattern, branch, group.offsets[index])) {
        const key = `${index}:${rows}`;
        if (!known.has(key)) known.set(key, yield* keysPerRow(pattern, index, rows));
        const keys = known.get(key);
        for (let i = 0, at = first; i < rows; i++, at += branch.r) seen[at] += keys[i];
        counts.branchPairs += group.heads * (causal ? (rows * (rows + 1)) / 2 : rows * rows);
      }
      yield;
    }
    let pairs = 0, covered = 0;
    for (let at = 0; at < tokens; at++) {
      const keys = seen[at];
      pairs += keys;
      covered += keys > 0;
      if (keys < counts.least) counts.least = keys;
      if (keys > counts.most) counts.most = keys;
    }
    counts.pairs += group.heads * pairs;
    counts.covered += group.heads * covered;
    yield;
  }
  const densePairs = heads * (causal ? (tokens * (tokens + 1)) / 2 : tokens * tokens);
  return { ...counts, densePairs, covered: counts.covered / (tokens * heads), mean: counts.pairs / (tokens * heads) };
}

/** Cost of the attention layers in training on one GPU: FLOPs of one layer, bytes and seconds of all layers. */
function cost({ tokens, heads, headDim, layers }, pairs, tflops, backwardWork, itemsize = 2) {
  const saved = tokens * (4 * heads * headDim * itemsize + 4 * heads); // q, k, v, out; lse
  const flops = 4 * headDim * pairs, forward = flops / (tflops * 1e12);
  return { flops, bytes: (layers + 1) * saved, forward, step: layers * (1 + backwardWork) * forward };
}

// ---- reach ----

const MOST_TILES_FOLLOWED = 2 ** 23; // (row of tiles, key tile) pairs

/** Whether reach follows the block pattern; otherwise it is that of the branches alone, which is never less. */
function followsTiles({ tokens, branches, sparse }) {
  if (!sparse) return true;
  const tiles = branches.map(({ w, r }) => ceilDiv(gridRows(Math.min(w, tokens), r, 0), sparse.block));
  return tiles.reduce((sum, T) => sum + T * T, 0) <= MOST_TILES_FOLLOWED;
}

/** The tokens that those of `seen` depend on after one more layer, whose heads are mixed. */
function oneLayer(pattern, table, seen) {
  const { branches, causal } = pattern, next = seen.slice(), follows = pattern.sparse && followsTiles(pattern);
  for (const [index, branch] of branches.entries()) {
    for (const offset of new Set(table[index])) {
      for (const { rows, first } of grids(pattern, branch, offset)) {
        const mark = (from, to) => {
          for (let i = from, at = first + from * branch.r; i < to; i++, at += branch.r) next[at] = 1;
        };
        const lastSeen = (from, to) => {
          for (let i = to - 1, at = first + i * branch.r; i >= from; i--, at -= branch.r) if (seen[at]) return i;
          return -1;
        };
        if (!follows) {
          const last = lastSeen(0, rows);
          if (last >= 0) mark(0, causal ? last + 1 : rows);
          continue;
        }
        const { block } = pattern.sparse, tiles = ceilDiv(rows, block), marked = new Uint8Array(tiles);
        for (let i = 0; i < tiles; i++) {
          const last = lastSeen(i * block, Math.min((i + 1) * block, rows));
          if (last < 0) continue;
          for (const j of keptTiles(pattern, index, tiles, i)) {
            if (causal && j === i) mark(i * block, last + 1);
            else if (!marked[j]) {
              mark(j * block, Math.min((j + 1) * block, rows));
              marked[j] = 1;
            }
          }
        }
      }
    }
  }
  return next;
}

/** The tokens that a row depends on after 1, 2, ... layers, as arrays of 0 and 1, until another layer adds none. */
function* reachOfRow(pattern, row, layers = pattern.layers) {
  const table = offsetTable(pattern), found = [];
  let seen = new Uint8Array(pattern.tokens);
  seen[row] = 1;
  for (let depth = 1, before = 1; depth <= layers; depth++) {
    seen = oneLayer(pattern, table, seen);
    let count = 0;
    for (let at = 0; at < seen.length; at++) count += seen[at];
    found.push({ seen, share: count / (pattern.causal ? row + 1 : pattern.tokens) });
    if (count === before) break;
    before = count;
    yield;
  }
  return found;
}

/** At most `most` of the numbers below `count`, evenly spread: the last one first. */
function spread(count, most) {
  const chosen = Math.min(count, most);
  if (chosen === 1) return [count - 1];
  const step = (count - 1) / (chosen - 1);
  return Array.from({ length: chosen }, (_, i) => {
    const x = i < chosen / 2 ? count - 1 - step * i : step * (chosen - i - 1), below = Math.floor(x);
    return x - below === 0.5 ? below + (below % 2) : Math.round(x); // halves go to the even number
  });
}

/** The rows whose reach is averaged: all of them, or in long sequences evenly spread ones, including the last. */
const spreadRows = (tokens, work) => spread(tokens, Math.max(1, Math.floor(work / tokens)));

/** Rows with which segments begin: of causal rows, these see the fewest tokens. */
function firstRows({ tokens, branches }, work) {
  const all = new Set();
  for (const { w } of branches) for (let start = 0; start < tokens; start += w) all.add(start);
  const firsts = [...all].sort((a, b) => a - b);
  return spread(firsts.length, Math.max(1, Math.floor(work / tokens))).map((place) => firsts[place]);
}

/** Mean and least share of the tokens that a row depends on, after 1, 2, ..., layers. */
function* reachShares(pattern, work) {
  const rows = spreadRows(pattern.tokens, work), others = rows.length < pattern.tokens ? firstRows(pattern, work) : [];
  const found = Array.from({ length: pattern.layers }, () => ({ sum: 0, least: Infinity }));
  for (const [number, row] of [...rows, ...others].entries()) {
    const depths = yield* reachOfRow(pattern, row);
    found.forEach((depth, index) => {
      const { share } = depths[Math.min(index, depths.length - 1)];
      if (number < rows.length) depth.sum += share;
      depth.least = Math.min(depth.least, share);
    });
    yield;
  }
  return found.map(({ sum, least }) => ({ mean: sum / rows.length, least }));
}

// ---- branches, and what is wrong with them ----

function gcd(a, b) {
  return b ? gcd(b, a % b) : a;
}

const FAR = 8;

/** Segments and rates that connect all tokens: branches_for of the package. */
function branchesFor(tokens, heads, causal, shortest = 2048) {
  const powers = Array.from({ length: Math.log2(shortest) + 1 }, (_, i) => 2 ** i), byLength = new Map();
  for (let r = 1; r <= Math.min(heads, shortest); r++) {
    if (heads % r === 0) byLength.set(shortest * powers.find((power) => power >= r), r);
  }
  const lengths = [...byLength.keys()], reaching = lengths.filter((w) => w < tokens);
  if (reaching.length < lengths.length) reaching.push(lengths[reaching.length]);
  const branches = reaching.map((w) => ({ w, r: byLength.get(w) })), last = branches.at(-1);
  while (last.w < tokens) last.w *= 2;
  if (!causal) return branches;
  const far = branches.slice(0, -1).filter(({ r }) => r >= FAR), most = Math.max(last.r, FAR);
  if (branches.length > 1) far.push({ w: last.w, r: Math.max(...[...byLength.values()].filter((r) => r <= most)) });
  const near = nearLengths(branches[0].w, tokens, shortest, far.length ? far.at(-1).r : 1);
  return [...near.map((w) => ({ w, r: 1 })), ...far];
}

/** Lengths of causal branches of rate 1, as the package chooses them. */
function nearLengths(first, tokens, shortest, least) {
  const near = [first], part = (share) => Math.floor(shortest * share);
  let odd = Math.max(part(11 / 16) - 1, least) | 1, next = Math.max(part(1 / 16), least) | 1;
  for (let shared = first; shared < tokens; odd = next, next += 2) {
    if (odd > 1 && gcd(odd, shared) === 1) {
      near.push(odd);
      shared *= odd;
    }
  }
  return near.sort((a, b) => a - b);
}

/** The reasons for which the package gives a ReachWarning: "tokens", "heads", "rows". */
function reachWarnings(pattern) {
  const { tokens, branches } = pattern, table = offsetTable(pattern), found = [];
  const longest = Math.max(...branches.map(({ w }) => w));
  if (tokens > longest) found.push({ reason: "tokens", longest });
  for (let index = branches.length - 1; index >= 0; index--) {
    const read = new Set(table[index].filter((offset) => offset !== null)).size;
    if (read < branches[index].r) {
      found.push({ reason: "heads", read, ...branches[index] });
      break;
    }
  }
  if (branches.every(({ r }) => r > 1)) found.push({ reason: "rows" });
  return found;
}

/** Why the package refuses a pattern, or null. */
function problem({ tokens, branches, heads, headDim, layers, sparse }) {
  const whole = (x) => Number.isSafeInteger(x) && x >= 1;
  if (!whole(tokens) || tokens > 2 ** 20) return "Tokens must be a whole number from 1 to 1,048,576.";
  if (!branches.length) return "A pattern needs a branch.";
  if (!branches.every(({ w, r }) => whole(w) && whole(r)))
    return "Segments and rates must be whole numbers of at least 1.";
  if (!whole(heads) || heads > 256) return "Heads must be a whole number from 1 to 256.";
  if (!whole(headDim)) return "Features per head must be a whole number of at least 1.";
  if (!whole(layers) || layers > 256) return "Layers must be a whole number from 1 to 256.";
  if (!sparse) return null;
  if (!(sparse.ratio > 0 && sparse.ratio <= 1)) return "Tiles kept is a fraction: above 0, at most 1.";
  const shortest = Math.min(...branches.map(({ w }) => w));
  if (!(Number.isInteger(Math.log2(sparse.block)) && sparse.block >= 1)) return "Rows per tile must be a power of two.";
  if (sparse.block > shortest)
    return `Tiles of ${sparse.block} rows are larger than the shortest segment, ${shortest} tokens.`;
  if (sparse.window !== null && !whole(sparse.window))
    return "The window must be a whole number of at least 1, or empty.";
  if (sparse.globals !== null && !(whole(sparse.globals) || sparse.globals === 0))
    return "Global rows must be a whole number of at least 0, or empty.";
  if (!(whole(sparse.seed) || sparse.seed === 0)) return "The seed must be a whole number of at least 0.";
  return null;
}

// ---- the same in Python, and as commands ----

/** Lines of Python that build the pattern's attention and call it. */
function pythonFor({ tokens, branches, layout, heads, headDim, causal, sparse }) {
  const name = sparse ? "BlockSparseDilatedAttention" : "DilatedAttention";
  const list = (key) => `[${branches.map((branch) => branch[key]).join(", ")}]`;
  const lines = [
    "import torch",
    `from dilated_attention_pytorch import ${sparse ? "SparsePatternConfig" : name}`,
    ...(sparse ? [`from dilated_attention_pytorch.nn import ${name}`] : []),
    "",
    `attention = ${name}(`,
    `    segment_lengths=${list("w")},`,
    `    dilation_rates=${list("r")},`,
  ];
  if (layout !== "interleaved") lines.push(`    head_layout="${layout}",`);
  if (sparse) {
    const words = [`"${sparse.pattern}"`, `sparsity_ratio=${sparse.ratio}`, `block_size=${sparse.block}`];
    if (sparse.window !== null) words.push(`local_window_size=${sparse.window}`);
    if (sparse.globals !== null) words.push(`global_tokens=${sparse.globals}`);
    if (sparse.pattern === "random") words.push(`seed=${sparse.seed}`);
    lines.push(`    sparse_config=SparsePatternConfig(${words.join(", ")}),`);
  }
  lines.push(")", "# (batch, tokens, heads, features)");
  lines.push(`q, k, v = torch.randn(3, 1, ${tokens}, ${heads}, ${headDim}).unbind(0)`);
  lines.push(`out = attention(q, k, v${causal ? ", is_causal=True" : ""})`);
  return lines.join("\n");
}

/** The commands that draw the pattern and, without a block pattern, plan its cost. */
function commandsFor({ tokens, branches, layout, heads, headDim, layers, causal, sparse }, head, gib, tflops) {
  const shared = ["--segments", ...branches.map(({ w }) => w), "--rates", ...branches.map(({ r }) => r)];
  shared.push("--tokens", tokens, "--heads", heads, "--head-dim", headDim, "--layers", layers);
  if (layout !== "interleaved") shared.push("--layout", layout);
  if (causal) shared.push("--causal");
  const show = ["./run show", ...shared, "--head", head];
  const plan = ["./run plan --gpus 1 --gpu", gib, ...shared, "--tflops", tflops];
  if (!sparse) return [show.join(" "), plan.join(" ")];
  show.push("--pattern", sparse.pattern, "--ratio", sparse.ratio, "--block", sparse.block);
  if (sparse.window !== null) show.push("--window", sparse.window);
  if (sparse.globals !== null) show.push("--global-tokens", sparse.globals);
  if (sparse.pattern === "random") show.push("--seed", sparse.seed);
  return [show.join(" ")];
}
