// The list: the trajectories that pass the filters, sorted, and the rows of those that are in view.

const ROW = 58; // pixels, as in the style sheet
const form = document.getElementById("filters");
const list = document.getElementById("list");
const rows = document.getElementById("rows");
const SORTS = {
  // The first key is the default: readers ask what the trained policy does, and then how it started.
  "latest first": (i) => -time(i),
  "as recorded": (i) => i,
  "outcome, low first": (i) => FIELDS.outcome[i] ?? Infinity,
  "outcome, high first": (i) => -(FIELDS.outcome[i] ?? -Infinity),
  "turns, most first": (i) => -COUNTED[i].turns,
  "tokens, most first": (i) => -COUNTED[i].tokens,
  "errors, most first": (i) => -COUNTED[i].errors,
  "seconds, most first": (i) => -(FIELDS.seconds[i] ?? -Infinity),
  "log p, lowest first": (i) => meanLogp(i) ?? Infinity,
  task: (i) => field("task", i),
};
let passing = []; // trajectories that pass the filters, sorted

const MEAN = new Map();
function meanLogp(i) {
  if (!MEAN.has(i)) {
    let sum = 0, count = 0;
    for (const turn of DATA.details[i].turns) {
      const column = values(turn.logp);
      if (column === null) continue;
      const chosen = turn.chosen.reduce((total, size, run) => total + (run % 2 ? size : 0), 0);
      sum += typeof column === "number" ? column * chosen : column.reduce((a, b) => a + b, 0);
      count += chosen;
    }
    MEAN.set(i, count ? sum / count : null);
  }
  return MEAN.get(i);
}

const TEXTS = [];
function textOfTask(i) {
  TEXTS[i] ??= [field("task", i), field("query", i), field("output", i) ?? "", ...DATA.details[i].answers.map(word)].join("\n").toLowerCase();
  return TEXTS[i];
}

/** Fill a filter with its choices, and the number of trajectories of each. */
function offer(name, of) {
  const counts = new Map();
  for (let i = 0; i < COUNT; i++) for (const value of [of(i)].flat()) if (value) counts.set(value, (counts.get(value) ?? 0) + 1);
  const select = form.elements[name];
  select.replaceChildren(h("option", { value: "" }, `any ${NAMED[name] ?? name}`));
  for (const value of [...counts.keys()].sort()) select.append(h("option", { value }, `${visible(value)} (${counts.get(value)})`));
  select.hidden = counts.size === 0;
}

const OFFERED = {
  domain: (i) => field("domain", i),
  phase: (i) => field("phase", i),
  result,
  status: (i) => field("status", i),
  tool: (i) => [...COUNTED[i].tools].map(word),
  changed: change,
};
const NAMED = { changed: "before → after" };
const RANGES = { turns: (i) => COUNTED[i].turns, outcome: (i) => FIELDS.outcome[i], update: (i) => FIELDS.update[i] };

/** A bound of a range; null if it is empty or no number, which is marked. */
function bound(name) {
  const input = form.elements[name], value = Number(input.value.trim().replace("−", "-").replace(",", "."));
  const isBad = input.value.trim() !== "" && Number.isNaN(value);
  input.setAttribute("aria-invalid", isBad);
  return input.value.trim() === "" || isBad ? null : value;
}

/** Filter and sort again; the open trajectory stays open if it passes. */
function refilter() {
  const words = form.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = Object.entries(OFFERED).map(([name, of]) => [form.elements[name].value, of]).filter(([value]) => value);
  const ranges = Object.entries(RANGES).map(([name, of]) => [bound(`${name}-low`), bound(`${name}-high`), of]).filter(([low, high]) => low !== null || high !== null);
  const passes = (i) => chosen.every(([value, of]) => [of(i)].flat().includes(value))
    && ranges.every(([low, high, of]) => of(i) !== null && (low === null || of(i) >= low) && (high === null || of(i) <= high))
    && words.every((each) => textOfTask(i).includes(each));
  for (const name of Object.keys(OFFERED)) form.elements[name].classList.toggle("set", form.elements[name].value !== "");
  const key = SORTS[form.elements.sort.value], keys = new Map();
  passing = Array.from({ length: COUNT }, (_, i) => i).filter(passes);
  for (const i of passing) keys.set(i, key(i));
  passing.sort((a, b) => (keys.get(a) < keys.get(b) ? -1 : keys.get(a) > keys.get(b) ? 1 : a - b));
  document.getElementById("count").replaceChildren(...count());
  rows.style.height = `${passing.length * ROW}px`;
  rows.replaceChildren();
  list.scrollTop = 0;
  open(passing.includes(state.open) ? state.open : passing[0] ?? null);
}

/** Number of trajectories that pass, and the fraction solved by phase, as each phase has another policy. */
function count() {
  const phases = new Map();
  for (const i of [...passing].sort((a, b) => time(a) - time(b))) {
    const counts = phases.get(field("phase", i)) ?? { solved: 0, valid: 0 };
    counts.solved += result(i) === "solved";
    counts.valid += FIELDS.counts[i];
    phases.set(field("phase", i), counts);
  }
  const rates = [...phases].filter(([, { valid }]) => valid).map(([phase, { solved, valid }]) => h("span", {},
    h("span", { class: "muted" }, `${visible(phase) || "solved"} `), `${solved.toLocaleString("en")} of ${valid.toLocaleString("en")} solved (${Math.round((100 * solved) / valid)} %)`));
  return [h("span", {}, `${passing.length.toLocaleString("en")} of ${COUNT.toLocaleString("en")}`), ...rates];
}

/** Draw the rows that are in view. */
function drawRows() {
  const first = Math.max(Math.floor(list.scrollTop / ROW) - 4, 0);
  const last = Math.min(Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 4, passing.length);
  const drawn = [];
  for (let place = first; place < last; place++) drawn.push(row(passing[place], place));
  if (!passing.length) drawn.push(h("p", { class: "empty" }, "Nothing passes these filters."));
  rows.replaceChildren(...drawn);
  if (state.open !== null && document.getElementById(`row-${state.open}`)) list.setAttribute("aria-activedescendant", `row-${state.open}`);
  else list.removeAttribute("aria-activedescendant");
}

function row(i, place) {
  const { turns, errors } = COUNTED[i], is = result(i);
  const facts = [field("domain", i), when(i), plural(turns, "turn"), errors ? plural(errors, "error") : ""].filter(Boolean).map(visible);
  const element = h("div", {
    class: "row", id: `row-${i}`, role: "option", "aria-selected": String(i === state.open),
    "aria-posinset": place + 1, "aria-setsize": passing.length, onclick: () => { open(i); },
  },
  h("span", { class: `mark ${is}`, title: is, "aria-label": is }, MARKS[is]),
  h("span", { class: "query" }, visible(field("query", i)).slice(0, 200)),
  h("span", { class: "outcome" }, FIELDS.outcome[i] === null ? "–" : number(FIELDS.outcome[i])),
  h("span", { class: "facts" }, facts.join(" · ")));
  element.style.transform = `translateY(${place * ROW}px)`;
  return element;
}

/** Scroll to the row of the open trajectory. */
function reveal() {
  const place = passing.indexOf(state.open);
  if (place < 0) return;
  if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
  if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
}

/** Open the trajectory `step` rows further on. */
function walk(step) {
  if (!passing.length) return;
  const place = passing.indexOf(state.open);
  open(passing[Math.min(Math.max(place + step, 0), passing.length - 1)]);
}
