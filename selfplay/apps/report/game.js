"use strict";
// Shared by the run's page and the play page: elements, themes, tips, and the drawing of one game.
// Every text of a game is set as text; nothing here parses HTML.
const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "style") for (const [key, given] of Object.entries(value)) node.style.setProperty(key, given);
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const seatClass = (seat) => `seat${seat % 5}`;
const seatName = (game, seat) => game.seats[seat].role || `seat ${seat}`;
const share = (value) => (typeof value === "number" ? value.toFixed(3) : "–");
const short = (value) => (typeof value !== "number" ? "–" : Number.isInteger(value) ? String(value) : Math.abs(value) < 1e-4 ? value.toExponential(1) : Number(value.toPrecision(4)).toString());
const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(3);

// --- theme and tips
const root = document.documentElement;
const kept = { get: () => { try { return localStorage.getItem("selfplay-theme"); } catch { return null; } },
  set: (value) => { try { localStorage.setItem("selfplay-theme", value); } catch { /* a page from a file may have no storage */ } } };
if (["light", "dark"].includes(kept.get())) root.dataset.theme = kept.get();
find("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  kept.set(root.dataset.theme);
});
const tip = find("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY - height - 12 < 4 ? event.clientY + 16 : event.clientY - height - 12}px`;
}
const hideTip = () => { tip.hidden = true; };

// --- one game
// A text of a game; its lists with columns ("name|price") become tables.
function prose(text) {
  const parts = [];
  for (const line of text.split("\n")) {
    const cells = line.split("|").map((cell) => cell.trim()), last = parts.at(-1);
    if (cells.length === 1) { if (typeof last === "string") parts[parts.length - 1] += `\n${line}`; else parts.push(line); }
    else if (Array.isArray(last) && last[0].length === cells.length) last.push(cells);
    else parts.push([cells]);
  }
  return parts.map((part) => (typeof part === "string" ? part
    : make("div", { class: "list" }, make("table", {}, part.map((cells) => make("tr", {}, cells.map((cell) => make("td", {}, cell))))))));
}

const proposalsOf = (game) => game.turns.map((turn, number) => ({ ...turn.proposal, seat: turn.seat, number })).filter((turn) => turn.cells);
const among = (cells, r, c) => cells.some(([row, column]) => row === r && column === c);
// A note of a turn: texts, and its errors.
const note = (pieces) => pieces.map((piece) => (typeof piece === "string" ? piece : make("span", { class: "wrong" }, piece.wrong)));

// The tables, the private views and the talk of a game; `picked` is the proposal on the table.
function gamePanels(game, texts, picked, pick) {
  const panels = views(game, texts);
  // Three short views, as in the brief style, are side by side.
  const narrow = panels.length > 2 && !game.seats.some((seat) => texts[seat.system]);
  if (!game.board) return [make("div", { class: `views ${narrow ? "small" : "texts"}` }, panels), talk(game, picked, pick)];
  const both = pooled(game, picked, pick);
  const tables = game.board.columns.length <= 4
    ? [make("div", { class: "views small" }, panels[0], both, panels.slice(1))]
    : [make("div", { class: "views" }, panels), both];
  return [...tables, talk(game, picked, pick)];
}

function grid(board, cellOf, corner) {
  const size = board.columns.length;
  const cells = [make("span", { class: "name" }, corner || "")];
  cells.push(...board.columns.map((name) => make("span", { class: "name", title: name }, name)));
  board.rows.forEach((name, r) => {
    cells.push(make("span", { class: "name row", title: name }, name));
    board.columns.forEach((_, c) => cells.push(cellOf(r, c)));
  });
  return make("div", { class: "grid", style: { "grid-template-columns": `minmax(3.2rem, auto) repeat(${size}, minmax(${size > 4 ? 1.8 : 2.6}rem, 6rem))` } }, cells);
}

function pooled(game, picked, pick) {
  const board = game.board, proposals = proposalsOf(game), shown = proposals[picked];
  const best = (shown && shown.best) || board.best || [];
  const table = grid(board, (r, c) => {
    const cell = shown && shown.cells.find(([row, column]) => row === r && column === c), value = board.cells[r][c];
    const seen = board.seen ? board.seen[r][c] : [];
    return make("span", { class: `cell ${cell ? `chosen ${seatClass(shown.seat)}` : ""} ${among(best, r, c) ? "best" : ""}` },
      make("span", { class: "dots" }, seen.map((seat) => make("i", { class: seatClass(seat), title: `${seatName(game, seat)} sees it` }))),
      value === null ? "·" : String(value),
      cell && cell[2] ? make("span", { class: `lost ${cell[2].startsWith("+") ? "gain" : ""}`, title: "against the best" }, cell[2]) : null);
  });
  table.classList.add("pool");
  return make("div", { class: "panel" },
    make("div", { class: "who" }, board.title || "The table", board.note ? make("small", {}, board.note) : null),
    proposals.length ? make("div", { class: "choices" }, proposals.map((one, i) => make("button", {
      type: "button", class: seatClass(one.seat), "aria-pressed": String(i === picked),
      on: { click: () => pick(i) },
    }, `${seatName(game, one.seat)}: ${one.label || "proposal"}`))) : null,
    table,
    board.key ? make("p", { class: "key" }, board.key) : null);
}

function views(game, texts) {
  return game.seats.map((seat, number) => {
    const prompt = [texts[seat.system], texts[seat.user]].filter(Boolean);
    const own = game.board && (game.board.own || [])[number];
    const table = own && grid(own, (r, c) => {
      const value = own.cells[r][c];
      return make("span", { class: `cell ${value === null ? "unseen" : "seen"}` }, value === null ? "·" : String(value));
    });
    const raw = prompt.map((text) => make("pre", {}, prose(text)));
    return make("div", { class: `panel view ${seatClass(number)}` },
      make("div", { class: "who" }, seatName(game, number), seat.player ? make("small", {}, seat.player) : null, own && own.note ? make("small", {}, own.note) : null),
      table || null,
      table ? make("details", {}, make("summary", {}, "what it reads first"), raw)
        : texts[seat.system] ? [make("details", {}, make("summary", {}, "the rules it reads"), make("pre", {}, texts[seat.system])), make("pre", {}, prose(texts[seat.user]))] : raw);
  });
}

function talk(game, picked, pick) {
  const numbers = proposalsOf(game).map((one) => one.number);
  return make("div", { class: "panel" }, make("div", { class: "talk" }, game.turns.map((turn, number) => {
    const at = numbers.indexOf(number);
    const tag = /^\s*(?:\w{1,8}\s*:\s*)?\[([^\[\]\n]{0,40})\]\s*/.exec(turn.text);
    const body = !turn.error && tag && tag[1].trim().toLowerCase() === turn.action ? turn.text.slice(tag[0].length) : turn.text;
    const node = make("div", { class: `turn ${seatClass(turn.seat)} ${turn.action ? "" : "refused"} ${at >= 0 ? "pick" : ""}` },
      make("div", { class: "who" }, seatName(game, turn.seat), turn.error ? make("span", { class: "tag wrong" }, `invalid: ${(turn.error_kind || "error").replaceAll("_", " ")}`) : make("span", { class: turn.action ? "tag" : "tag wrong" }, turn.action || "cut off: no tokens left")),
      turn.thought ? make("div", { class: "thought" }, spelled(turn, turn.thought, true)) : null,
      body || turn.error ? make("div", { class: "text" }, body ? spelled(turn, body) : "(nothing)") : null,
      turn.error ? make("div", { class: "told" }, `It read: ${turn.error}`) : null,
      (turn.notes || []).map((pieces) => make("div", { class: "note" }, note(pieces))),
      readers(game, turn),
      turn.branch ? branch(turn.branch) : null);
    if (at >= 0) node.addEventListener("click", () => { if (picked !== at) pick(at); });
    return node;
  }), game.turns.length ? null : make("p", { class: "quiet" }, "Nobody moved.")));
}

// What a game without tables shows the mover (such as a tool's answer), and who reads the move if not
// everybody does.
function readers(game, turn) {
  const own = !game.board && turn.read[turn.seat], others = turn.read.map((text, seat) => [seat, text]).filter(([seat, text]) => seat !== turn.seat && text);
  const parts = [];
  if (own) parts.push(make("div", { class: "read" }, "It reads: ", prose(own)));
  if (game.seats.length > 2 && !turn.error) parts.push(make("div", { class: "note" }, others.length ? `read by ${others.map(([seat]) => seatName(game, seat)).join(", ")}` : "read by nobody else"));
  return parts;
}

function branch(point) {
  const mean = point.siblings.reduce((sum, one) => sum + one.value, 0) / point.siblings.length;
  return make("details", { class: "branch", open: true },
    make("summary", {}, `branch point: ${point.siblings.length} turns tried here, mean value ${share(mean)}`),
    point.siblings.map((one, i) => make("div", { class: i ? "" : "took" },
      make("span", { class: "val", style: { "--v": `${100 * one.value}%` }, title: `scores ${one.scores.map(share).join(", ")}` }, share(one.value)),
      make("span", { class: one.error ? "wrong" : "" }, (i ? "" : "taken: ") + (one.text || "(nothing)")))));
}

// What colours tokens: the numbers of a turn's tokens and the scale. The play page uses none.
const heat = { mode: "", most: 0 };
const diverging = (less, more) => ({
  hue: (value) => (value < 0 ? less : more), share: (value) => 70 * Math.abs(value) / (heat.most || 1),
  low: () => `−${short(heat.most)}`, high: () => `+${short(heat.most)}`,
  strip: `linear-gradient(to right, color-mix(in srgb, ${less} 70%, transparent), transparent, color-mix(in srgb, ${more} 70%, transparent))`,
});
const heats = {
  "log-prob": {
    what: "by the engine, in nats", hue: () => "var(--bad)", share: (value) => Math.min(75, 5 - value * 25), low: () => "p = 1", high: () => "p ≤ 0.06",
    strip: "linear-gradient(to right, color-mix(in srgb, var(--bad) 5%, transparent), color-mix(in srgb, var(--bad) 75%, transparent))",
  },
  advantage: { what: "as used in the loss", ...diverging("var(--bad)", "var(--good)") },
  ratio: { what: "its logarithm: trainer minus engine, in nats, before the step", ...diverging("var(--s1)", "var(--s0)") },
};
const valuesOf = (turn, mode) => (mode === "log-prob" ? (turn.tokens || []).map(([, nats]) => nats) : turn[{ advantage: "advantages", ratio: "mismatch" }[mode]] || []);

// A part of a turn's text as its sampled tokens, each with its log-prob. A thought is the `first`
// such text of the turn, a move the last. A record has only the first tokens of a long turn.
function spelled(turn, part, first) {
  if (!turn.tokens) return part;
  const whole = turn.tokens.map(([piece]) => piece).join("");
  let start = first ? whole.indexOf(part) : whole.lastIndexOf(part);
  for (let at = 0; start < 0 && at < whole.length - 8; at++) if (part.startsWith(whole.slice(at))) start = at;
  if (start < 0) return part;
  const spans = [];
  const values = heat.mode ? valuesOf(turn, heat.mode) : [], scale = heats[heat.mode];
  let at = 0;
  for (const [number, [piece, nats]] of turn.tokens.entries()) {
    const from = Math.max(at, start), to = Math.min(at + piece.length, start + part.length);
    if (from < to) {
      const advantage = turn.advantages?.[number], apart = turn.mismatch?.[number], value = values[number];
      const told = (event) => {
        event.stopPropagation();
        showTip(event, [`${JSON.stringify(piece)}  ${nats.toFixed(3)} nats, p ${Math.exp(nats).toPrecision(3)}`,
          typeof advantage === "number" && `advantage ${signed(advantage)}`,
          typeof apart === "number" && `ratio ${Math.exp(apart).toPrecision(6)}, mismatch ${short(apart)} nats`].filter(Boolean).join("\n"));
      };
      const hot = typeof value === "number", style = hot ? { "--hue": scale.hue(value), "--p": scale.share(value) } : {};
      spans.push(make("span", { class: `token ${hot ? "hot" : heat.mode ? "plain" : ""}`, style, on: { pointermove: told, click: told, pointerleave: hideTip } }, whole.slice(from, to)));
    }
    at += piece.length;
  }
  spans.push(part.slice(at - start));
  return spans;
}
