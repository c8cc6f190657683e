// The page's data: columns by trajectory, tables by number, tokens packed as base64 until they are looked at.

const DATA = JSON.parse(document.getElementById("data").textContent);
const FIELDS = DATA.fields;
const COUNT = FIELDS.task.length;
const BEFORE = "test before", AFTER = "test after";

/** A string by its number. */
const word = (number) => (number === null ? null : DATA.strings[number]);

/** The string that a column holds for trajectory i. */
const field = (name, i) => word(FIELDS[name][i]);

function bytes(packed) {
  const text = atob(packed);
  const out = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) out[k] = text.charCodeAt(k);
  return new DataView(out.buffer);
}

/** How many values of four bytes a packed column has, without unpacking it. */
function packedLength(packed) {
  const padding = packed.endsWith("==") ? 2 : packed.endsWith("=") ? 1 : 0;
  return ((packed.length / 4) * 3 - padding) / 4;
}

/** One number for all chosen tokens, or one each; null where it isn't known. */
function values(column) {
  if (typeof column !== "string") return column;
  const view = bytes(column);
  return Float32Array.from({ length: view.byteLength / 4 }, (_, k) => view.getFloat32(4 * k, true));
}

/** A turn ready to be shown: ids and texts of its tokens, which are chosen, and what is known of those. */
function readTurn(turn) {
  if (turn.read) return turn.read;
  const view = bytes(turn.tokens);
  const numbers = Array.from({ length: view.byteLength / 4 }, (_, k) => view.getUint32(4 * k, true));
  const rank = new Int32Array(numbers.length).fill(-1); // of a token among the chosen ones
  let at = 0, count = 0;
  turn.chosen.forEach((size, run) => {
    for (let k = 0; k < size; k++, at++) if (run % 2) rank[at] = count++;
  });
  const known = Object.fromEntries(QUANTITIES.slice(1).map((name) => [name, values(turn[name])]));
  turn.read = { numbers, rank, chosen: count, known };
  return turn.read;
}

/** A quantity of a token: a number, or null for context and where it isn't known. */
function quantity(read, name, k) {
  const rank = read.rank[k], column = read.known[name];
  if (rank < 0 || column === null || column === undefined) return null;
  return typeof column === "number" ? column : column[rank];
}

/** Text in which every character can be seen: what is invisible, or hides or reorders others, is named. */
function visible(text) {
  // All of "Other" (controls, formats, lone surrogates) but tab and newline, what fonts leave out, and two blank signs.
  return text.replace(/(?![\t\n])[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800\u{1d159}]/gu,
    (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// What the list shows and filters by, counted once.
const COUNTED = DATA.details.map((detail) => ({
  turns: detail.turns.length,
  tokens: detail.turns.reduce((sum, turn) => sum + packedLength(turn.tokens), 0),
  errors: detail.turns.filter((turn) => turn.error).length,
  tools: new Set(detail.turns.map((turn) => turn.tool).filter((tool) => word(tool) !== "")),
}));

/** solved, failed, or invalid where the trajectory takes part in nothing. */
function outcome(i) {
  if (!FIELDS.counts[i]) return "invalid";
  return FIELDS.correct[i] ? "solved" : "failed";
}

const MARKS = { solved: "✓", failed: "✕", invalid: "∅" };

// Trajectories of the same task, by the number of its name.
const OF_TASK = new Map();
FIELDS.task.forEach((task, i) => {
  if (!OF_TASK.has(task)) OF_TASK.set(task, []);
  OF_TASK.get(task).push(i);
});

/** How late i was played: after training comes last, before training first, and updates stand between them. */
function time(i) {
  const phase = field("phase", i);
  return phase === AFTER ? Infinity : phase === BEFORE ? -1 : FIELDS.update[i] ?? 0;
}

/** The trajectory that belongs beside i: the same task after or before training, else the next one of its task. */
function partner(i) {
  const others = OF_TASK.get(FIELDS.task[i]).filter((other) => other !== i);
  const across = { [BEFORE]: AFTER, [AFTER]: BEFORE }[field("phase", i)];
  const counterpart = others.find((other) => field("phase", other) === across && FIELDS.sample[other] === FIELDS.sample[i])
    ?? others.find((other) => field("phase", other) === across);
  return counterpart ?? others.find((other) => other > i) ?? others[0] ?? null;
}

/** What became of the task of i: its outcome before and after, where both are known. */
function change(i) {
  const of = (phase) => OF_TASK.get(FIELDS.task[i]).filter((other) => field("phase", other) === phase);
  const [before, after] = [of(BEFORE), of(AFTER)];
  if (!before.length || !after.length) return null;
  const solved = (list) => list.some((other) => outcome(other) === "solved");
  return `${solved(before) ? "solved" : "failed"} → ${solved(after) ? "solved" : "failed"}`;
}

/** When a trajectory was played: its phase, and the update where there is one. */
function when(i) {
  const update = FIELDS.update[i];
  return [field("phase", i), update === null ? "" : `update ${update}`].filter(Boolean).join(" · ");
}

// What rounds to zero has no sign.
const number = (value, digits = 2) => (value === null ? "–" : Number(value).toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−"));
const signed = (value, digits = 2) => (value > 0 ? "+" : "") + number(value, digits);
const plural = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

/** An element with its attributes and children; strings become text, and nothing is ever read as HTML. */
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
