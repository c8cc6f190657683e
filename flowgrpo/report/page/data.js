// The data of the page: columns by trajectory, tables by index, tokens packed as base64 until they are shown.

const DATA = JSON.parse(document.getElementById("data").textContent);
const FIELDS = DATA.fields;
const COUNT = FIELDS.task.length;
const BEFORE = "test before", AFTER = "test after";

/** A string by its index. */
const word = (number) => (number === null ? null : DATA.strings[number]);

/** The string of trajectory i in a column. */
const field = (name, i) => word(FIELDS[name][i]);

function bytes(packed) {
  const text = atob(packed);
  const out = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) out[k] = text.charCodeAt(k);
  return new DataView(out.buffer);
}

/** Number of four-byte values of a packed column, without unpacking it. */
function packedLength(packed) {
  const padding = packed.endsWith("==") ? 2 : packed.endsWith("=") ? 1 : 0;
  return ((packed.length / 4) * 3 - padding) / 4;
}

/** One number for all chosen tokens, or one for each; null if it is unknown. */
function values(column) {
  if (typeof column !== "string") return column;
  const view = bytes(column);
  return Float32Array.from({ length: view.byteLength / 4 }, (_, k) => view.getFloat32(4 * k, true));
}

/** A turn unpacked: its tokens as indices of the vocabulary, which of them are chosen, and their quantities. */
function readTurn(turn) {
  if (turn.read) return turn.read;
  const view = bytes(turn.tokens);
  const numbers = Array.from({ length: view.byteLength / 4 }, (_, k) => view.getUint32(4 * k, true));
  const rank = new Int32Array(numbers.length).fill(-1); // index among the chosen tokens; -1: context
  let at = 0, count = 0;
  turn.chosen.forEach((size, run) => {
    for (let k = 0; k < size; k++, at++) if (run % 2) rank[at] = count++;
  });
  const known = Object.fromEntries(QUANTITIES.slice(1).map((name) => [name, values(turn[name])]));
  turn.read = { numbers, rank, chosen: count, known };
  return turn.read;
}

/** A quantity of a token: a number, or null for context and if it is unknown. */
function quantity(read, name, k) {
  const rank = read.rank[k], column = read.known[name];
  if (rank < 0 || column === null || column === undefined) return null;
  return typeof column === "number" ? column : column[rank];
}

/** Text with every character visible: one that is invisible, or hides or reorders others, is replaced by its code. */
function visible(text) {
  // All of "Other" (controls, formats, lone surrogates) but tab and newline, what fonts leave out, and two blank signs.
  return text.replace(/(?![\t\n])[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800\u{1d159}]/gu,
    (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// Counts that the list shows and filters by.
const COUNTED = DATA.details.map((detail) => ({
  turns: detail.turns.length,
  tokens: detail.turns.reduce((sum, turn) => sum + packedLength(turn.tokens), 0),
  errors: detail.turns.filter((turn) => turn.error).length,
  tools: new Set(detail.turns.map((turn) => turn.tool).filter((tool) => word(tool) !== "")),
}));

/** solved, failed, or invalid for a trajectory without a valid outcome. */
function result(i) {
  if (!FIELDS.counts[i]) return "invalid";
  return FIELDS.correct[i] ? "solved" : "failed";
}

const MARKS = { solved: "✓", failed: "✕", invalid: "∅" };

// Trajectories by task.
const OF_TASK = new Map();
FIELDS.task.forEach((task, i) => {
  if (!OF_TASK.has(task)) OF_TASK.set(task, []);
  OF_TASK.get(task).push(i);
});

/** Sort key of time: before training first, then by update, after training last. */
function time(i) {
  const phase = field("phase", i);
  return phase === AFTER ? Infinity : phase === BEFORE ? -1 : FIELDS.update[i] ?? 0;
}

/** The trajectory to show beside i: the same task after or before training, else the next one of its task. */
function partner(i) {
  const others = OF_TASK.get(FIELDS.task[i]).filter((other) => other !== i);
  const across = { [BEFORE]: AFTER, [AFTER]: BEFORE }[field("phase", i)];
  const counterpart = others.find((other) => field("phase", other) === across && FIELDS.sample[other] === FIELDS.sample[i])
    ?? others.find((other) => field("phase", other) === across);
  return counterpart ?? others.find((other) => other > i) ?? others[0] ?? null;
}

/** The results of the task of i before and after training; null unless both are known. */
function change(i) {
  const of = (phase) => OF_TASK.get(FIELDS.task[i]).filter((other) => field("phase", other) === phase);
  const [before, after] = [of(BEFORE), of(AFTER)];
  if (!before.length || !after.length) return null;
  const solved = (list) => list.some((other) => result(other) === "solved");
  return `${solved(before) ? "solved" : "failed"} → ${solved(after) ? "solved" : "failed"}`;
}

/** Phase and update of a trajectory. */
function when(i) {
  const update = FIELDS.update[i];
  return [field("phase", i), update === null ? "" : `update ${update}`].filter(Boolean).join(" · ");
}

// A number that rounds to zero has no sign.
const number = (value, digits = 2) => (value === null ? "–" : Number(value).toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−"));
const signed = (value, digits = 2) => (value > 0 ? "+" : "") + number(value, digits);
const plural = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

/** An element with attributes and children; strings become text nodes, and are never parsed as HTML. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
