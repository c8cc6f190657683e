// One trajectory, or two side by side: task and outcome, then context, action and tool calls turn by turn.

const FOLDED = 30; // longer contexts, in tokens, are folded at first
const LAST = 90; // number of characters in the preview of a folded context
const shownPart = document.getElementById("shown");

/** A trajectory as an article. */
function article(i) {
  const detail = DATA.details[i];
  return h("article", { "aria-label": `trajectory ${i + 1}` },
    heading(i), ...detail.calls.map(callOf), ...detail.turns.map((turn, t) => turnOf(turn, t, detail)),
    detail.turns.length ? null : h("p", { class: "empty" }, "It ended before its first turn."));
}

function heading(i) {
  const detail = DATA.details[i], is = result(i), status = field("status", i), query = visible(field("query", i));
  const place = [field("domain", i), when(i), `group ${FIELDS.group[i]}, sample ${FIELDS.sample[i]}`, field("task", i)];
  const seconds = FIELDS.seconds[i];
  const known = [
    ["Answer", field("output", i) !== null ? text(field("output", i)) : quiet(status === "FINISHED" ? "none was recorded" : "none: it ended before")],
    ["Gold answer", detail.answers.length ? text(detail.answers.map(word).join("\n")) : quiet("none: the environment judges")],
    ["Reward reason", word(detail.reward_reason) ? text(word(detail.reward_reason)) : null],
    ["Reward parts", Object.keys(detail.parts).length ? partsOf(detail.parts) : null],
    ["Status", h("span", {}, h("b", {}, status.toLowerCase().replaceAll("_", " ")), quiet(` ${word(detail.reason) || DATA.endings[status]}`))],
    ["Length", h("span", {}, `${plural(COUNTED[i].turns, "turn")}, ${plural(COUNTED[i].tokens, "token")}`, seconds === null ? "" : `, ${number(seconds)} s`)],
  ];
  return h("header", { class: "task" },
    h("p", { class: "place" }, visible(place.filter(Boolean).join("  ·  "))),
    h("div", { class: "score" }, h("span", { class: `badge ${is}` }, `${MARKS[is]} ${is}`), h("span", { class: "outcome" }, `outcome ${number(FIELDS.outcome[i], 3)}`)),
    h("h2", {}, query),
    h("dl", {}, ...known.filter(([, value]) => value !== null).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    others(i));
}

const text = (value) => h("span", { class: "text" }, visible(value));
const quiet = (value) => h("span", { class: "muted" }, visible(value));
const partsOf = (parts) => h("span", { class: "parts" }, ...Object.entries(parts).map(([name, value]) => h("span", {}, quiet(`${name} `), number(value, 3))));

/** The other trajectories of the task: a click opens one, a shift-click or the key b shows it side by side. */
function others(i) {
  const all = OF_TASK.get(FIELDS.task[i]);
  if (all.length < 2) return null;
  const chips = all.slice(0, 24).map((other) => h("button", {
    type: "button", class: `chip ${result(other)}`, "aria-pressed": String(other === i), title: `${when(other)}, sample ${FIELDS.sample[other]}`,
    onclick: (event) => (event.shiftKey ? setBeside(other) : open(other)),
  }, `${MARKS[result(other)]} ${chipName(other)} ${number(FIELDS.outcome[other])}`));
  const more = all.length > 24 ? quiet(`and ${all.length - 24} more`) : null;
  const compare = h("button", { type: "button", class: "compare", onclick: toggleBeside }, state.beside === null ? "Side by side (b)" : "One alone (b)");
  return h("nav", { class: "others", "aria-label": "The same task" }, quiet("same task"), ...chips, more, compare);
}

const chipName = (i) => ({ [BEFORE]: "before", [AFTER]: "after" }[field("phase", i)] ?? `#${FIELDS.sample[i]}`);

// Turns --------------------------------------------------------------------------------------------------

function turnOf(turn, t, detail) {
  const read = readTurn(turn), tool = word(turn.tool), next = detail.turns[t + 1];
  const logps = values(turn.logp);
  const mean = logps === null || !read.chosen ? null : typeof logps === "number" ? logps : logps.reduce((a, b) => a + b, 0) / logps.length;
  const advantage = values(turn.advantage);
  const facts = [
    plural(read.chosen, "token"), mean === null ? "" : `mean log p ${number(mean)}`,
    typeof advantage === "number" ? `advantage ${signed(advantage)}` : "", turn.reward === null ? "" : `reward ${number(turn.reward)}`,
    typeof turn.version === "number" ? `version ${turn.version}` : "",
  ];
  const head = h("h3", {}, h("span", {}, `Turn ${t + 1}`), tool ? h("span", { class: "tool" }, visible(tool)) : null,
    turn.error ? h("span", { class: "error" }, "⚠ error") : null, h("span", { class: "facts" }, facts.filter(Boolean).join("  ·  ")));
  const calls = turn.calls.map(callOf);
  if (turn.error && !turn.calls.length) calls.push(refused(next ? t + 1 : null));
  return h("section", { class: turn.error ? "turn wrong" : "turn", tabindex: "-1" }, head, ...runs(turn), ...calls);
}

/** The line below an action that was refused, with a link to the context that says why, if there is a next turn. */
function refused(next) {
  const link = h("button", { type: "button", onclick: () => showContext(link.closest("article"), next) }, `See the context of turn ${next + 1}`);
  return h("p", { class: "call refused" }, h("span", { class: "muted" }, "The action was refused, and nothing was called."), next === null ? null : link);
}

/** Unfold the contexts of a turn, and scroll to it. */
function showContext(article, t) {
  const turn = article.querySelectorAll(".turn")[t];
  for (const context of turn.querySelectorAll("details.context")) context.open = true;
  walkTurns(t - (state.turn ?? -1));
}

/** Context and actions of a turn, in order. */
function runs(turn) {
  const out = [];
  let at = 0;
  turn.chosen.forEach((size, run) => {
    if (size) out.push(run % 2 ? h("pre", { class: "action", tabindex: "-1" }, spans(turn, at, at + size)) : contextOf(turn, at, at + size));
    at += size;
  });
  return out;
}

function contextOf(turn, from, to) {
  const size = to - from, body = h("pre", { class: "prompt" });
  const tail = visible(textOf(turn, Math.max(from, to - 60), to)).replace(/\s+/g, " ").trim();
  const preview = tail.length > LAST ? `… ${tail.slice(-LAST).replace(/^\S*\s/, "")}` : tail;
  const fill = () => { if (details.open && !body.childNodes.length) body.append(spans(turn, from, to)); };
  const details = h("details", { class: "context", ontoggle: fill },
    h("summary", {}, h("span", {}, `context, ${plural(size, "token")}`), h("span", { class: "preview" }, preview)), body);
  details.open = state.unfolded ?? size <= FOLDED;
  fill();
  return details;
}

/** A call of a tool or a role, and its answer; the long texts of roles are folded. */
function callOf([kind, name, arguments_, answer, isError, failure]) {
  const given = arguments_.map(([key, value]) => h("div", {}, h("span", { class: "muted" }, `${visible(word(key))} `), h("span", { class: "text" }, visible(word(value)))));
  const broke = word(failure);
  const answered = h("div", { class: isError || broke ? "answer wrong" : "answer" }, h("span", { class: "arrow", "aria-hidden": "true" }, "→"),
    isError || broke ? h("span", { class: "error" }, broke ? "⚠ failed" : "⚠ error") : null, h("span", { class: "text" }, visible(broke || word(answer))));
  const title = [h("span", { class: "tool" }, visible(word(name))), quiet(word(kind) === "tool" ? "called" : "asked")];
  if (word(kind) === "tool") return h("div", { class: "call" }, h("div", { class: "who" }, ...title), h("div", { class: "given" }, ...given), answered);
  return h("details", { class: "call" }, h("summary", {}, ...title), h("div", { class: "given" }, ...given), answered);
}

// Moving through turns -------------------------------------------------------------------------------------

/** The current turn. */
const currentTurn = () => shownPart.querySelector(".turn.current");

/** Move by `step` turns, in both trajectories if two are shown. */
function walkTurns(step) {
  const articles = [...shownPart.querySelectorAll("article")];
  const most = Math.max(...articles.map((each) => each.querySelectorAll(".turn").length));
  if (!(most > 0)) return;
  state.turn = Math.min(Math.max((state.turn ?? -1) + step, 0), most - 1);
  setCursor(null);
  for (const each of articles) each.querySelectorAll(".turn").forEach((turn, t) => turn.classList.toggle("current", t === state.turn));
  const top = currentTurn();
  top?.scrollIntoView({ block: "start" });
  top?.focus({ preventScroll: true });
}

/** Fold or unfold all contexts, here and in trajectories that are opened next. */
function toggleContexts() {
  const all = [...shownPart.querySelectorAll("details.context")];
  state.unfolded = !(state.unfolded ?? (all.length > 0 && all.every((each) => each.open)));
  for (const each of all) each.open = state.unfolded;
}
