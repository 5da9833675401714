// The page of play: asks for the state, shows the seat's view, sends moves.
const token = document.querySelector("meta[name=play-token]").content;
const play = { state: null, chosen: new Map(), picked: -1, drawn: -1 };

async function call(path, body) {
  const options = { headers: { "x-play-token": token } };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  try {
    const response = await fetch(path, options), value = await response.json();
    if (!response.ok) throw new Error(value.error);
    find("trouble").hidden = true;
    show(value);
    return true;
  } catch (error) {
    find("trouble").textContent = error instanceof TypeError ? "The game's program does not answer. Is it still running?" : error.message;
    find("trouble").hidden = false;
    return false;
  }
}

async function poll() {
  await call("state");
  setTimeout(poll, play.state && play.state.phase === "theirs" ? 300 : 1500);
}

function show(state) {
  if (state.version < play.drawn) return; // an older answer that came late
  const fresh = !play.state || state.game !== play.state.game;
  play.state = state;
  if (state.version === play.drawn) return;
  play.drawn = state.version;
  if (fresh) { play.chosen.clear(); play.picked = -1; }
  const playing = state.game > 0 && state.phase !== "over" && state.phase !== "idle";
  find("welcome").hidden = playing;
  find("playing").hidden = !playing;
  find("ending").hidden = state.phase !== "over";
  find("status").textContent = { idle: "", yours: "Your move", theirs: "Your partner is thinking …", over: "The game is over" }[state.phase];
  if (playing) drawPlaying(state);
  if (state.phase === "over") drawEnding(state);
}

function drawPlaying(state) {
  const board = state.board, yours = state.phase === "yours", due = Boolean(board && board.answer_due);
  find("own").className = `panel view ${seatClass(state.seat)}`;
  find("own").hidden = !board;
  find("builder").hidden = !board;
  if (board) { drawBoard(state, yours && !due); drawBuilder(board, yours && !due); }
  find("prompt").textContent = [state.prompt.system, state.prompt.user].filter(Boolean).join("\n\n");
  document.querySelector(".rules").open = !board;
  const talk = find("talk");
  talk.replaceChildren(...state.talk.map((turn) => turnNode(state, turn)), ...(yours ? [] : [make("p", { class: "waiting" }, "Your partner is thinking …")]));
  talk.scrollTop = talk.scrollHeight;
  find("answers").hidden = !due;
  for (const id of ["accept", "reject"]) find(id).disabled = !(yours && due);
  find("say").hidden = Boolean(board && (!board.messages || due));
  find("words").placeholder = board ? "Say something to your partner" : "Your move, beginning with its [tag]";
  find("send").disabled = !yours;
  find("leave").disabled = !yours;
  if (yours && !find("say").hidden && innerWidth > 760) find("words").focus();
}

function turnNode(state, turn) {
  if (turn.seat === undefined) return make("div", { class: "turn" }, make("div", { class: "text" }, turn.text));
  const mine = turn.seat === state.seat;
  return make("div", { class: `turn ${seatClass(turn.seat)} ${turn.error ? "refused" : ""}` },
    make("div", { class: "who" }, mine ? "you" : "your partner", turn.error ? make("span", { class: "tag wrong" }, "refused") : turn.kind ? make("span", { class: "tag" }, turn.kind) : null),
    turn.text ? make("div", { class: "text" }, turn.text) : null,
    turn.error ? make("div", { class: "told" }, turn.error) : null);
}

// The own table is the builder: a cell gives its paper to its reviewer. A reviewer or a paper that
// has a pair already loses it, so no two pairs can clash.
function drawBoard(state, building) {
  const board = state.board, pending = board.pending || [];
  const table = grid(board, (r, p) => {
    const value = board.shown[r][p], mine = play.chosen.get(p) === r, theirs = pending.some(([row, paper]) => row === r && paper === p);
    const shown = value === null ? "·" : String(value), named = `${board.rows[r]}, ${board.columns[p]}: ${value === null ? "you do not see it" : value}`;
    const look = `cell ${value === null ? "unseen" : "seen"} ${mine ? "mine" : ""} ${theirs ? `theirs` : ""}`;
    const style = theirs ? { "--t": `var(--s${board.pending_seat % 5})` } : {};
    if (!building) return make("span", { class: look, style, title: named }, shown);
    return make("button", { type: "button", class: look, style, title: named, "aria-label": named, "aria-pressed": String(mine), on: { click: () => choose(r, p) } }, shown);
  });
  find("own").replaceChildren(
    make("div", { class: "who" }, "Your table", make("small", {}, `you are seat ${state.seat}`), board.unknown === null ? make("small", {}, "in your own units") : null),
    table,
    make("p", { class: "key" }, board.pending ? "Framed: the proposal on the table." : "A dot: you do not see this value.", board.unknown === null ? "" : ` A value that nobody sees counts as ${board.unknown}.`));
}

function choose(r, p) {
  if (play.chosen.get(p) === r) play.chosen.delete(p);
  else {
    for (const [paper, reviewer] of play.chosen) if (reviewer === r) play.chosen.delete(paper);
    play.chosen.set(p, r);
    const size = play.state.board.rows.length;
    if (play.chosen.size === size - 1) { // one reviewer and one paper are left: they go together
      const free = [...Array(size).keys()];
      play.chosen.set(free.find((paper) => !play.chosen.has(paper)), free.find((reviewer) => ![...play.chosen.values()].includes(reviewer)));
    }
  }
  drawBoard(play.state, true);
  drawBuilder(play.state.board, true);
}

function drawBuilder(board, building) {
  const size = board.rows.length, left = size - play.chosen.size;
  const known = [...play.chosen].map(([p, r]) => board.shown[r][p]).filter((value) => value !== null);
  const pairs = [...play.chosen].sort((a, b) => a[0] - b[0]);
  find("builder").replaceChildren(
    make("div", { class: "who" }, "Your proposal"),
    pairs.length ? make("div", { class: "text" }, pairs.map(([p, r]) => `${board.columns[p]}: ${board.rows[r]}`).join("\n"))
      : make("p", { class: "key" }, "Choose one cell of your table for each paper."),
    make("p", { class: "key" }, pairs.length ? `${known.length} of ${pairs.length} pairs are values you see, together ${known.reduce((a, b) => a + b, 0)}.` : ""),
    make("div", { class: "actions" },
      make("button", { type: "button", class: "big", id: "propose", disabled: !building || left > 0, on: { click: propose } }, left ? `Propose (${left} to choose)` : "Propose"),
      make("button", { type: "button", id: "clear", disabled: !building || !pairs.length, on: { click: () => { play.chosen.clear(); drawBoard(play.state, true); drawBuilder(board, true); } } }, "Clear")));
}

async function propose() {
  if (await call("move", { pairs: [...play.chosen].map(([p, r]) => [r, p]) })) play.chosen.clear();
}

function drawEnding(state) {
  const result = state.result, again = find("start");
  again.textContent = "Play another game";
  if (!result || !result.game) {
    find("before").textContent = (result && result.error) || "The game ended without a result.";
    find("ending").replaceChildren();
    return;
  }
  const game = result.game;
  find("heading").textContent = "How it ended";
  find("before").replaceChildren(make("span", { class: "big-score" }, game.agreed ? `${(100 * game.score_norm).toFixed(0)} % of what was possible` : "No agreement"),
    make("br"), game.agreed ? "You agreed. Below is everything that was hidden." : `${{ turns: "The moves ran out.", retries: "Too many tries were refused.", tokens: "Your partner ran out of tokens." }[game.ended] || "The game ended."} Below is everything that was hidden.`);
  const pick = (number) => { play.picked = number; find("ending").replaceChildren(...gamePanels(game, result.texts, number, pick)); };
  pick(proposalsOf(game).length - 1);
}

find("start").addEventListener("click", () => call("start", {}));
find("accept").addEventListener("click", () => call("move", { answer: "accept" }));
find("reject").addEventListener("click", () => call("move", { answer: "reject" }));
find("leave").addEventListener("click", () => call("move", { leave: true }));
find("say").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = find("words").value;
  if (!words.trim() || find("send").disabled) return;
  const plain = Boolean(play.state.board);
  if (await call("move", plain ? { message: words } : { text: words })) find("words").value = "";
});
find("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); find("say").requestSubmit(); }
});
poll();
