// Tokens as spans, coloured by the current quantity; the values of the one under the pointer or the cursor.

const tip = document.getElementById("tip");
let cursor = null; // the token that the arrow keys move

/** Spans for the tokens from..to of a turn; white space around the text of a token is not coloured. */
function spans(turn, from, to) {
  const read = readTurn(turn), out = document.createDocumentFragment();
  for (let k = from; k < to; k++) {
    const piece = visible(DATA.vocabulary.pieces[read.numbers[k]]).replaceAll("\n", "↵\n");
    const [, before, own, after] = /^ *$/.test(piece) ? ["", "", piece, ""] : /^( *)(.*?)([ \n]*)$/s.exec(piece);
    const span = h("span", { class: read.rank[k] < 0 ? "t context" : "t" }, own);
    span.turn = turn;
    span.place = k;
    paint(span);
    out.append(before, span, after);
  }
  return out;
}

const paint = (span) => { span.style.backgroundColor = tokenColour(state.colour, readTurn(span.turn), span.place); };

/** Colour all visible tokens again. */
function repaint() {
  for (const span of document.querySelectorAll(".t")) paint(span);
}

/** The text of the tokens from..to, for a preview. */
function textOf(turn, from, to) {
  const read = readTurn(turn);
  return read.numbers.slice(from, to).map((number) => DATA.vocabulary.pieces[number]).join("");
}

function describe(span) {
  const read = readTurn(span.turn), k = span.place, number_ = read.numbers[k];
  const rows = [
    ["text", JSON.stringify(visible(DATA.vocabulary.pieces[number_]))],
    ["token id", String(DATA.vocabulary.ids[number_])],
    ["position", `${k + 1} of ${read.numbers.length}, ${read.rank[k] < 0 ? "context" : "chosen"}`],
  ];
  if (read.rank[k] < 0) return rows;
  const logp = quantity(read, "logp", k), advantage = quantity(read, "advantage", k);
  const ratio = quantity(read, "ratio", k), version = quantity(read, "version", k);
  if (logp !== null) rows.push(["log p", `${number(logp, 4)}   p ${number(Math.exp(logp), 4)}`]);
  rows.push(["advantage", advantage === null ? "not recorded" : signed(advantage, 4)]);
  rows.push(["ratio", ratio === null ? "not scored" : number(ratio, 4)]);
  if (version !== null) rows.push(["version", String(version)]);
  return rows;
}

function showTip(span) {
  tip.replaceChildren(...describe(span).flatMap(([name, value]) => [h("span", {}, name), h("b", {}, value)]));
  tip.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 12);
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${below ? box.bottom + 8 : Math.max(box.top - tip.offsetHeight - 8, 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

/** Move the cursor to a token, or remove it (null). */
function setCursor(span) {
  cursor?.classList.remove("cursor");
  cursor = span;
  if (span === null) return hideTip();
  span.classList.add("cursor");
  span.scrollIntoView({ block: "nearest" });
  showTip(span);
}

/** Move the cursor right (1) or left (-1); without a cursor, to the first chosen token of the current turn. */
function moveCursor(step) {
  const all = [...document.querySelectorAll("#shown .t")].filter((span) => span.offsetParent !== null);
  if (!all.length) return;
  const start = cursor?.isConnected ? all.indexOf(cursor) : -1;
  if (start >= 0) return setCursor(all[Math.min(Math.max(start + step, 0), all.length - 1)]);
  const turn = currentTurn();
  setCursor(all.find((span) => turn?.contains(span) && !span.classList.contains("context")) ?? all[0]);
}

document.addEventListener("mouseover", (event) => {
  const span = event.target.closest?.(".t");
  if (span) showTip(span);
  else if (cursor?.isConnected) showTip(cursor);
  else hideTip();
});
document.addEventListener("click", (event) => {
  const span = event.target.closest?.(".t");
  if (span) setCursor(span === cursor ? null : span);
});
