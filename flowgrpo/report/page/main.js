// State: which trajectories are open, and the colouring; keys, and the URL fragment that stores the state.

const state = { open: null, beside: null, colour: "mask", turn: null, unfolded: null };
const KEYS = {
  "j  ↓": "next trajectory", "k  ↑": "previous trajectory", "g  G": "first, last trajectory",
  "n  p": "next, previous turn", "←  →": "token by token, with its values", f: "fold or unfold contexts",
  c: "next colouring (C: the one before)", b: "the same task side by side, before or after training", "/": "search", "Esc": "leave the search or the token",
  "?": "these keys",
};

/** Open a trajectory; a second one beside it is replaced by the new one's counterpart. */
function open(i) {
  if (i === state.open && shownPart.childNodes.length) return drawRows();
  state.beside = state.beside === null || i === null ? null : partner(i);
  state.open = i;
  draw();
  reveal();
  drawRows();
}

function draw() {
  state.turn = null;
  setCursor(null);
  let shown = [state.open, state.beside].filter((i) => i !== null);
  if (shown.length === 2 && field("phase", shown[0]) === AFTER && field("phase", shown[1]) === BEFORE) shown.reverse(); // time runs rightwards
  shownPart.className = shown.length > 1 ? "two" : "one";
  shownPart.replaceChildren(...(shown.length ? shown.map(article) : [h("p", { class: "empty" }, "Nothing passes the filters, so nothing is open.")]));
  document.getElementById("main").scrollTop = 0;
  drawLegend(shown);
  remember();
}

function drawLegend(shown = [state.open, state.beside].filter((i) => i !== null)) {
  document.getElementById("legend").replaceChildren(...legend(state.colour, shown));
}

function setBeside(i) {
  state.beside = i === state.open ? null : i;
  draw();
}

function toggleBeside() {
  if (state.open !== null) setBeside(state.beside === null ? partner(state.open) : null);
}

function setColour(name) {
  state.colour = name;
  form.ownerDocument.getElementById(`colour-${name}`).checked = true;
  repaint();
  drawLegend();
  remember();
}

/** Switch to the next available colouring. */
function cycle(step) {
  const known = QUANTITIES.filter(isKnown);
  setColour(known[(known.indexOf(state.colour) + step + known.length) % known.length]);
}

function remember() {
  const parts = { n: state.open === null ? null : state.open + 1, beside: state.beside === null ? null : state.beside + 1, colour: state.colour };
  history.replaceState(null, "", `#${new URLSearchParams(Object.entries(parts).filter(([, value]) => value !== null))}`);
}

/** Restore the state from the URL fragment. */
function recall() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const place = (name) => { const i = Number(fragment.get(name)) - 1; return Number.isInteger(i) && i >= 0 && i < COUNT ? i : null; };
  if (QUANTITIES.includes(fragment.get("colour"))) setColour(fragment.get("colour"));
  state.open = place("n");
  return place("beside");
}

const ACTIONS = {
  j: () => walk(1), k: () => walk(-1), ArrowDown: () => walk(1), ArrowUp: () => walk(-1),
  g: () => walk(-COUNT), G: () => walk(COUNT), n: () => walkTurns(1), p: () => walkTurns(-1),
  ArrowRight: () => moveCursor(1), ArrowLeft: () => moveCursor(-1),
  f: toggleContexts, c: () => cycle(1), C: () => cycle(-1), b: toggleBeside,
  "/": () => { form.elements.search.focus(); form.elements.search.select(); },
  "?": () => document.getElementById("help").showModal(),
  Escape: () => setCursor(null),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const target = event.target, isField = target.matches("input, select, textarea");
  if (isField && event.key === "Escape") { target.blur(); return; }
  if (isField && event.key === "Enter" && target.id === "search") { target.blur(); event.preventDefault(); return; }
  if (isField && !target.matches("input[type=radio]")) return;
  const action = ACTIONS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function start() {
  document.title = document.querySelector("h1").textContent = visible(DATA.title);
  document.getElementById("note").textContent = visible(DATA.note);
  for (const name of QUANTITIES) {
    const input = h("input", { type: "radio", name: "colour", id: `colour-${name}`, checked: name === state.colour, onchange: () => setColour(name) });
    const label = h("label", { for: input.id, class: isKnown(name) ? "" : "absent", title: isKnown(name) ? NAMES[name] : `not available: ${DATA.lacking[name]}` }, SHORT[name]);
    document.getElementById("colours").append(input, label);
  }
  document.getElementById("keys").append(...Object.entries(KEYS).flatMap(([keys, what]) => [h("dt", {}, ...keys.split("  ").map((key) => h("kbd", {}, key))), h("dd", {}, what)]));
  for (const [name, of] of Object.entries(OFFERED)) offer(name, of);
  for (const name of Object.keys(RANGES)) form.elements[`${name}-low`].parentElement.hidden = !Array.from({ length: COUNT }, (_, i) => RANGES[name](i)).some((x) => x !== null);
  form.elements.sort.append(...Object.keys(SORTS).map((name) => h("option", { value: name }, `↕ ${name}`)));
  document.getElementById("more").addEventListener("click", (event) => event.target.setAttribute("aria-expanded", String(form.classList.toggle("unfolded"))));
  document.getElementById("show-keys").addEventListener("click", ACTIONS["?"]);
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement, isDark = getComputedStyle(root).colorScheme === "dark" || (getComputedStyle(root).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.style.colorScheme = isDark ? "light" : "dark";
  });
  form.addEventListener("input", refilter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(refilter));
  list.addEventListener("scroll", drawRows);
  addEventListener("resize", drawRows);
  document.addEventListener("keydown", onKey);
  const beside = recall();
  refilter();
  if (beside !== null) setBeside(beside);
  document.body.getBoundingClientRect(); // forces the layout, for measurements
  performance.mark("opened");
}

start();
