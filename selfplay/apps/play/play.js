// The play page: requests the state, shows the seat's view, sends moves.
const token = document.querySelector("meta[name=play-token]").content;
const play = { state: null, chosen: new Map(), form: 0, picked: -1, drawn: -1, weighing: 0 };

async function ask(path, body) {
  const options = { headers: { "x-play-token": token } };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options), value = await response.json();
  if (!response.ok) throw new Error(value.error);
  return value;
}

async function call(path, body) {
  try {
    const value = await ask(path, body);
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
  if (state.version < play.drawn) return; // an older response that arrived late
  const fresh = !play.state || state.game !== play.state.game;
  play.state = state;
  if (state.version === play.drawn) return;
  play.drawn = state.version;
  if (fresh) { play.chosen.clear(); play.picked = -1; play.form = 0; find("words").value = ""; }
  const playing = state.game > 0 && state.phase !== "over" && state.phase !== "idle";
  find("welcome").hidden = playing;
  find("playing").hidden = !playing;
  find("start").disabled = state.phase === "taken"; // by another visitor; one's last game stays in view
  find("status").textContent = { idle: "", yours: "Your move", over: "The game is over", taken: "Somebody else plays here; you can start when that game is over" }[state.phase] ?? `${partners(state)} thinking …`;
  if (!state.game) return;
  find("ending").hidden = state.phase !== "over";
  find("about").hidden = state.phase === "over";
  // If the seat's own part is short, the rules have what it needs.
  if (fresh && playing) document.querySelector(".rules").open = !state.board && state.prompt.user.length < 200;
  if (playing) drawPlaying(state);
  if (state.phase === "over") drawEnding(state);
}

const partners = (state) => (state.names.length > 2 ? "The others are" : "Your partner is");
const nameOf = (state, seat) => state.called[seat];
// The person's role, "" if both players have the same role.
const roleOf = (state) => (state.called.includes("your partner") ? "" : `you are ${/\d$/.test(state.names[state.seat]) ? "" : "the "}${state.names[state.seat]}`);

function drawPlaying(state) {
  const board = state.board, yours = state.phase === "yours";
  find("own").className = `panel view ${seatClass(state.seat)}`;
  find("builder").hidden = !builder(state);
  if (board) drawBoard(state); else drawText(state);
  find("prompt").textContent = (board ? [state.prompt.system, state.prompt.user] : [state.prompt.system]).filter(Boolean).join("\n\n");
  document.querySelector(".rules").hidden = !find("prompt").textContent;
  const waiting = yours ? null : make("p", { class: "waiting" }, `${partners(state)} thinking …`);
  const rooms = state.rooms.map((name, room) => make("div", { class: "room" },
    make("div", { class: "who seat" + room }, `Room of ${name}`, make("small", {}, `${state.rooms.filter((_, other) => other !== room).join(", ")} never reads it`)),
    state.talk.filter((turn) => turn.room === undefined || turn.room === room).map((turn) => turnNode(state, turn))));
  const talk = find("talk");
  talk.classList.toggle("rooms", rooms.length > 0);
  talk.replaceChildren(...(rooms.length ? rooms : state.talk.map((turn) => turnNode(state, turn))), ...(waiting ? [waiting] : []));
  for (const box of rooms.length ? rooms : [talk]) box.scrollTop = box.scrollHeight;
  drawForms(state);
  find("leave").disabled = !yours;
  find("left").replaceChildren(...state.left.map((line) => make("li", {}, line)));
  find("example").hidden = !state.suggestion;
  find("suggestion").textContent = state.suggestion;
  find("suggest").hidden = !state.suggestion || state.forms.some((form) => form.button && form.before === state.suggestion);
}

function turnNode(state, turn) {
  if (turn.seat === undefined) return make("div", { class: "turn" }, make("div", { class: "read" }, prose(turn.note)));
  return make("div", { class: `turn ${seatClass(turn.seat)} ${turn.seat === state.seat ? "own" : ""} ${turn.error ? "refused" : ""}` },
    make("div", { class: "who" }, nameOf(state, turn.seat), turn.error ? make("span", { class: "tag wrong" }, "invalid") : turn.kind ? make("span", { class: "tag" }, turn.kind) : null),
    turn.text ? make("div", { class: "text" }, turn.text) : null,
    !turn.error && /\[\w+\]/.test(turn.text) ? make("div", { class: "told" }, "A [tag] within the words makes no move.") : null,
    turn.note ? make("div", { class: "read" }, prose(turn.note)) : null,
    turn.error ? make("div", { class: "told" }, turn.error) : null);
}

function drawText(state) {
  find("own").replaceChildren(
    make("div", { class: "who" }, roleOf(state) || "what you see", make("small", {}, "only you read this")),
    make("pre", {}, prose(state.prompt.user)));
}

// The possible moves: a button, a text, or one choice from each list. A board has its own builder.
const typed = (state) => state.forms.filter((form) => !form.button && !form.grid);
function drawForms(state) {
  const written = typed(state), buttons = state.forms.filter((form) => form.button);
  play.form = Math.min(play.form, Math.max(0, written.length - 1));
  const form = written[play.form];
  find("answers").replaceChildren(...buttons.map((one, i) => make("button", { type: "button", id: one.name.toLowerCase(), class: i ? "" : "big", on: { click: () => send(one.before) } }, one.name)));
  find("say").hidden = !form;
  if (!form) weigh("");
  if (!form) return;
  find("tabs").replaceChildren(...(written.length < 2 ? [] : written.map((one, i) => make("button", {
    type: "button", "aria-pressed": String(i === play.form), on: { click: () => { play.form = i; drawForms(state); } },
  }, one.name))));
  find("picks").replaceChildren(...form.choices.map(([name, options]) => make("label", {}, name, make("select", { on: { change: () => offer(form) } },
    make("option", { value: "" }, "choose …"), options.map(([value, label]) => make("option", { value }, label))))));
  find("send").textContent = { Search: "Search", Propose: "Propose" }[form.name] || "Send";
  const words = find("words");
  words.hidden = form.choices.length > 0;
  words.placeholder = form.hint;
  words.setAttribute("aria-label", form.hint || "your words");
  if (form.start && !words.value) words.value = form.start;
  else if (!form.start && written.some((one) => one.start === words.value)) words.value = "";
  offer(form);
  if (!words.hidden && innerWidth > 760) words.focus();
}

const picked = () => [...find("picks").querySelectorAll("select")].map((select) => select.value);

// A choice in one list is disabled in the others, and only a full choice can be sent.
function offer(form) {
  const chosen = picked();
  if (form.distinct) [...find("picks").querySelectorAll("select")].forEach((select, i) => {
    for (const option of select.options) option.disabled = option.value !== "" && option.value !== "NULL" && chosen.some((value, other) => other !== i && value === option.value);
  });
  find("send").disabled = chosen.includes("");
  weigh(written());
}

// The move in the form; "" until there is one.
function written() {
  const form = typed(play.state)[play.form], words = form && form.choices.length ? picked().join(form.between) : find("words").value;
  return form && words.trim() && !picked().includes("") ? form.before + words + form.after : "";
}

// Before a move is sent, show how many of the tokens that a model can still read it takes.
function weigh(text) {
  clearTimeout(play.weighing);
  const told = find("taken");
  if (!text) told.hidden = true;
  else play.weighing = setTimeout(async () => {
    const { words, ends } = await ask("taken", { text }).catch(() => ({ words: "" })); // sending the move reports the error
    told.textContent = words;
    told.className = ends ? "problem" : "key";
    told.hidden = !words || play.state.phase !== "yours";
  }, 250);
}

const send = (text) => call("move", { text });

// The person's table is the builder: each column's choice is a cell. If choices must be distinct, a
// new one removes the row's and the column's earlier choices, so none conflict.
const builder = (state) => state.forms.find((form) => form.grid);

function drawBoard(state) {
  const board = state.board, form = builder(state);
  const table = grid(board, (r, c) => {
    const value = board.cells[r][c], mine = play.chosen.get(c) === r, theirs = among(board.marks || [], r, c);
    const shown = value === null ? "·" : String(value), named = `${board.rows[r]}, ${board.columns[c]}: ${value === null ? "you do not see it" : value}`;
    const look = `cell ${value === null ? "unseen" : "seen"} ${mine ? "mine" : ""} ${theirs ? `theirs` : ""}`;
    const style = theirs ? { "--t": `var(--s${board.marked_by % 5})` } : {};
    if (!form) return make("span", { class: look, style, title: named }, shown);
    return make("button", { type: "button", class: look, style, title: named, "aria-label": named, "aria-pressed": String(mine), on: { click: () => choose(form, r, c) } }, shown);
  });
  find("own").replaceChildren(
    make("div", { class: "who" }, "Your table", roleOf(state) ? make("small", {}, roleOf(state)) : null, board.note ? make("small", {}, board.note) : null),
    table,
    make("p", { class: "key" }, (board.marks || []).length ? "Framed: the proposal on the table." : board.cells.flat().includes(null) ? "A dot: you do not see this value." : "", board.key ? ` ${board.key}` : ""));
  drawBuilder(state, form);
}

function choose(form, r, c) {
  if (play.chosen.get(c) === r) play.chosen.delete(c);
  else {
    if (form.distinct) for (const [column, row] of play.chosen) if (row === r) play.chosen.delete(column);
    play.chosen.set(c, r);
    const size = play.state.board.rows.length;
    if (form.distinct && form.choices.length === size && play.chosen.size === size - 1) { // one row and one column are left
      const left = [...Array(size).keys()];
      play.chosen.set(left.find((column) => !play.chosen.has(column)), left.find((row) => ![...play.chosen.values()].includes(row)));
    }
  }
  drawBoard(play.state);
}

const chosenText = (form) => form.before + form.choices.map(([, options], c) => options[play.chosen.get(c)][0]).join(form.between) + form.after;

function drawBuilder(state, form) {
  const board = state.board, left = form ? form.choices.length - play.chosen.size : 0;
  const known = [...play.chosen].map(([c, r]) => board.cells[r][c]).filter((value) => typeof value === "number");
  const chosen = [...play.chosen].sort((a, b) => a[0] - b[0]);
  if (form && !left) weigh(chosenText(form));
  find("builder").replaceChildren(
    make("div", { class: "who" }, "Your proposal"),
    chosen.length ? make("div", { class: "text" }, chosen.map(([c, r]) => `${board.columns[c]}: ${board.rows[r]}`).join("\n"))
      : make("p", { class: "key" }, "Choose one cell of your table in each column."),
    make("p", { class: "key" }, chosen.length ? `${known.length} of ${chosen.length} are values you see, together ${known.reduce((a, b) => a + b, 0)}.` : ""),
    make("div", { class: "actions" },
      make("button", { type: "button", class: "big", id: "propose", disabled: !form || left > 0, on: { click: () => propose(form) } }, left ? `Propose (${left} to choose)` : "Propose"),
      make("button", { type: "button", id: "clear", disabled: !form || !chosen.length, on: { click: () => { play.chosen.clear(); drawBoard(play.state); } } }, "Clear")));
}

// A scripted player's move in this seat, filled into the form for such a move.
function suggest() {
  const { suggestion, forms } = play.state;
  const written = forms.filter((form) => !form.button), fits = written.filter((form) => suggestion.startsWith(form.before.trim()));
  const form = fits.sort((a, b) => b.before.length - a.before.length)[0];
  if (!form) return;
  const words = suggestion.slice(form.before.trim().length).trim();
  const said = words.slice(0, words.length - form.after.length).split(form.between);
  if (form.grid) {
    play.chosen = new Map(form.choices.map(([, options], c) => [c, options.findIndex(([value]) => value === said[c])]).filter(([, r]) => r >= 0));
    drawBoard(play.state);
    return;
  }
  play.form = typed(play.state).indexOf(form);
  drawForms(play.state);
  if (!form.choices.length) find("words").value = words;
  said.forEach((value, i) => { const list = find("picks").querySelectorAll("select")[i]; if (list) list.value = value; });
  offer(form);
}

async function propose(form) {
  if (await send(chosenText(form))) play.chosen.clear();
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
  game.seats.forEach((seat, place) => {
    seat.role = nameOf(state, place);
    seat.player = place === state.seat ? "" : `played by ${seat.player === "policy" ? "the policy" : seat.player}`;
  });
  find("heading").textContent = "How it ended";
  // If the seats' scores differ, there is no common one.
  const scores = game.seat_scores || [], differ = scores.some((one) => one !== scores[0]);
  const each = scores.map((one, place) => `${nameOf(state, place)} ${(100 * one).toFixed(0)} %`).join(", ");
  find("before").replaceChildren(make("span", { class: "big-score" }, differ ? `${each[0].toUpperCase()}${each.slice(1)} of what was possible` : game.agreed ? `${(100 * game.score_norm).toFixed(0)} % of what was possible` : "No agreement"),
    make("br"), `${result.limit ? `A limit ended the game: ${result.limit}` : !game.agreed ? "The game ended" : differ ? "The game is decided" : "You agreed"}. Below is everything that was hidden.`);
  const pick = (number) => {
    play.picked = number;
    find("ending").replaceChildren(...gamePanels(game, result.texts, number, pick));
    for (const turn of find("ending").querySelectorAll(`.turn.${seatClass(state.seat)}`)) turn.classList.add("own");
  };
  pick(proposalsOf(game).length - 1);
}

find("start").addEventListener("click", () => call("start", {}));
find("suggest").addEventListener("click", suggest);
find("leave").addEventListener("click", () => call("move", { leave: true }));
find("say").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = written();
  if (!text || find("send").disabled) return;
  find("send").disabled = true;
  if (await send(text)) find("words").value = "";
  else find("send").disabled = false;
});
find("words").addEventListener("input", () => weigh(written()));
find("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); find("say").requestSubmit(); }
});
poll();
