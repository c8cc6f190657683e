// The quantities that tokens are coloured by: a scale and a legend for each, or why it is not available.

const QUANTITIES = ["mask", "logp", "advantage", "ratio", "version"];
const NAMES = { mask: "mask", logp: "log-probability", advantage: "advantage", ratio: "ratio", version: "weight version", ...DATA.names };
const SHORT = { mask: "mask", logp: "log p", advantage: "advantage", ratio: "ratio", version: "version" };
const HUES = ["blue", "orange", "green", "purple", "yellow", "sky"];
const STRONGEST = 72; // percent of a hue in the background, up to which text is readable

const isKnown = (name) => name === "mask" || DATA.scales[name] !== null;
const mix = (hue, fraction) => `color-mix(in oklab, var(--${hue}) ${Math.round(STRONGEST * Math.min(Math.max(fraction, 0), 1))}%, transparent)`;

/** The colour of a value; "" if there is none. */
function colour(name, value) {
  if (value === null || Number.isNaN(value)) return "";
  if (name === "logp") return mix("orange", -value / DATA.scales.logp);
  if (name === "version") return mix(HUES[value % HUES.length], 0.6);
  const scaled = (name === "ratio" ? Math.log(value) : value) / DATA.scales[name];
  return mix(scaled < 0 ? "orange" : "blue", Math.abs(scaled));
}

/** The colour of a token of a turn. */
function tokenColour(name, read, k) {
  if (read.rank[k] < 0) return "";
  return name === "mask" ? mix("blue", 0.45) : colour(name, quantity(read, name, k));
}

function swatch(background, text) {
  const box = h("span", { class: "swatch" });
  box.style.background = background;
  return h("span", { class: "key" }, box, text);
}

function ramp(name, stops, labels) {
  const bar = h("span", { class: "ramp" });
  bar.style.background = `linear-gradient(to right in oklab, ${stops.map((value) => colour(name, value)).join(", ")})`;
  return h("span", { class: "scale" }, h("span", {}, labels[0]), bar, ...labels.slice(1).map((label) => h("span", {}, label)));
}

/** The legend of a quantity, for these trajectories. */
function legend(name, shown) {
  const title = h("strong", {}, NAMES[name]);
  if (!isKnown(name)) return [title, h("span", { class: "lacking" }, `not available: ${DATA.lacking[name]}`)];
  if (name === "mask") return [title, swatch(mix("blue", 0.45), "sampled by the policy"), swatch("transparent", "context")];
  const parts = [title, ...scaleOf(name, shown)];
  const has = (i) => DATA.details[i].turns.some((turn) => turn[name] !== null);
  if (!shown.some(has)) parts.push(h("span", { class: "lacking" }, "not recorded for this trajectory"));
  return parts;
}

const brief = (value) => String(Number(value.toPrecision(3)));

function scaleOf(name, shown) {
  const end = DATA.scales[name];
  if (name === "logp") return [ramp(name, [0, -end / 2, -end], ["0, certain", `≤ −${end}, surprising`])];
  if (name === "advantage") return [ramp(name, [-end, 0, end], [`≤ ${number(-end)}`, `≥ ${signed(end)}`]), h("span", { class: "muted" }, "0 is blank")];
  if (name === "ratio") return [ramp(name, [Math.exp(-end), 1, Math.exp(end)], [`≤ ${brief(Math.exp(-end))}`, `≥ ${brief(Math.exp(end))}`]), h("span", { class: "muted" }, "1 is blank")];
  const versions = new Set();
  for (const i of shown) for (const turn of DATA.details[i].turns) {
    const column = values(turn.version);
    if (typeof column === "number") versions.add(column);
    else if (column !== null) column.forEach((version) => versions.add(version));
  }
  return [...versions].sort((a, b) => a - b).map((version) => swatch(colour(name, version), String(version)));
}
